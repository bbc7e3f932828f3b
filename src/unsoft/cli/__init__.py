"""The command line: ``unsoft list | bench | theory | cache``. One thin file per command; see ``app`` for how errors are shown."""

from unsoft.cli.app import main

__all__ = ["main"]
