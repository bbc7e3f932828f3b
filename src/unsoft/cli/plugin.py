"""``--plugin``: code of the user's own that registers tasks or mechanisms before a command runs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

Plugin = Annotated[
    str | None,
    typer.Option(
        help="A module or a .py file to import first: it registers tasks or mechanisms of your own.",
        show_default=False,
    ),
]


def load_plugin(name: str | None) -> None:
    """Imports a module by its name, or a file by its path."""
    if name is None:
        return
    path = Path(name)
    try:
        if path.suffix != ".py":
            importlib.import_module(name)
            return
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is not Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    except (ImportError, OSError) as problem:
        raise typer.BadParameter(f"{name} cannot be imported: {problem}", param_hint="'--plugin'") from None
