"""What the executor of PTX complains about."""


class PtxError(Exception):
    """The kernel did something it must not."""
