"""Where a command writes, tried out before any work: what would stop it is told at once, not after a minute."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import typer

_OUT = "'--out'"


def check_folder(out: Path) -> None:
    """Can files be written in the folder ``out``, which need not exist yet? Leaves nothing behind."""
    nearest = out.absolute()
    try:
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir():
            raise typer.BadParameter(f"{out} cannot be made a folder: {nearest} is a file", param_hint=_OUT)
        descriptor, tried = tempfile.mkstemp(dir=nearest, prefix=".unsoft-", suffix=".tmp")
        # Asking for permission is not enough: root has it everywhere, on read-only file systems too.
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)
            os.unlink(tried)
    except OSError as problem:
        raise typer.BadParameter(f"{out} cannot be written: {problem.strerror}", param_hint=_OUT) from None


def prepare_folder(out: Path) -> None:
    """Makes the folder ``out``, in which files can be written."""
    check_folder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise typer.BadParameter(
            f"{out} cannot be made a folder: {problem.strerror}", param_hint=_OUT
        ) from None


def check_file(out: Path) -> None:
    """Can the file ``out`` be written or replaced? Its folder must exist."""
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {out.absolute().parent} does not exist", param_hint=_OUT)
    if out.is_dir():
        raise typer.BadParameter(f"{out} is a folder, not a file", param_hint=_OUT)
    check_folder(out.absolute().parent)
