"""Errors of the PTX executor."""


class PtxError(Exception):
    """The kernel did something invalid."""
