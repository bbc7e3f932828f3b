"""Texts that commands read: a file of the user's, or one that is always there."""

from __future__ import annotations

from pathlib import Path

import typer


def read_text(path: Path) -> str:
    """The whole of a text file, checked."""
    try:
        found = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{path} is not text in UTF-8", param_hint="'--text'") from None
    except OSError as problem:
        raise typer.BadParameter(
            f"{path} cannot be read: {problem.strerror}", param_hint="'--text'"
        ) from None
    if not found.strip():
        raise typer.BadParameter(f"{path} is empty", param_hint="'--text'")
    return found


def python_reference() -> str:
    """The language reference that comes with Python: some 110,000 tokens of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise typer.BadParameter(
            "this Python comes without its language reference, which is read by default; give a file",
            param_hint="'--text'",
        ) from None
    return "\n\n".join(topics.values())
