"""The command line. Each file of ``commands`` is a command; see ``app`` for how errors are shown."""

from unsoft.cli.app import main

__all__ = ["main"]
