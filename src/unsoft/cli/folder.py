"""The folder of ``--out``, checked before any work."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def prepare_folder(out: Path) -> None:
    """Makes the folder; everything that would stop files from being written there is a wrong ``--out``."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise typer.BadParameter(
            f"{out} cannot be made a folder: {problem.strerror}", param_hint="'--out'"
        ) from None
    if not os.access(out, os.W_OK):
        raise typer.BadParameter(f"{out} cannot be written", param_hint="'--out'")
