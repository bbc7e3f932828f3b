"""The command line: ``unsoft list | bench | cache``. One thin file per command; see ``app`` for how errors are shown."""

from unsoft.cli.app import main

__all__ = ["main"]
