"""What users give to commands, checked before any work: folders and files to write, plug-ins, settings."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

_OUT = "'--out'"


def path_option(help: str, *, show_default: bool = True) -> Any:
    """Return an option for a path that is written to. An empty one is an error: it would become the current
    folder."""
    return typer.Option(help=help, parser=_path, metavar="<path>", show_default=show_default)


def _path(text: str | Path) -> Path:
    if not str(text):
        raise typer.BadParameter("a path cannot be empty; the current folder is '.'")
    return Path(text)


Plugin = Annotated[
    str | None,
    typer.Option(
        help="A module or a .py file to import first: it registers tasks or mechanisms of your own.",
        show_default=False,
    ),
]
"""The option ``--plugin``: code of the user's own that registers tasks or mechanisms before a command
runs."""

AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON instead of tables; notes go to stderr.")
]

Layers = Annotated[
    str | None, typer.Option(help="Only these: 0,4-7,-1; or what each of them gets: 0=softmax,8-=relu2.")
]
KeepFirstLast = Annotated[
    bool, typer.Option("--keep-first-last", help="Softmax in the first and last layer.")
]
"""The layers of a model that a mechanism goes into."""


def folder_name(*words: object) -> Path:
    """The folder of a run in runs/, from words of which some may hold what files cannot be called.

    >>> folder_name("census", "s/n + 1", 0)
    PosixPath('runs/census-s_n_+_1-0')
    """
    return Path("runs") / re.sub(r"[^\w.+()-]", "_", "-".join(map(str, words)))


def check_folder(out: Path, option: str = _OUT) -> None:
    """Can files be written in the folder ``out`` that ``option`` names, which need not exist yet? Leaves
    nothing behind."""
    nearest = out.absolute()
    try:
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir():
            raise typer.BadParameter(f"{out} cannot be made a folder: {nearest} is a file", param_hint=option)
        descriptor, tried = tempfile.mkstemp(dir=nearest, prefix=".unsoft-", suffix=".tmp")
        # Asking for permission is not enough: root has it everywhere, on read-only file systems too.
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)
            os.unlink(tried)
    except OSError as problem:
        raise typer.BadParameter(f"{out} cannot be written: {problem.strerror}", param_hint=option) from None


def prepare_folder(out: Path) -> None:
    """Makes the folder ``out``, in which files can be written."""
    check_folder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise typer.BadParameter(
            f"{out} cannot be made a folder: {problem.strerror}", param_hint=_OUT
        ) from None


def check_file(out: Path, option: str = _OUT) -> None:
    """Can the file ``out`` be written or replaced? Its folder must exist."""
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {out.absolute().parent} does not exist", param_hint=option)
    if out.is_dir():
        raise typer.BadParameter(f"{out} is a folder, not a file", param_hint=option)
    check_folder(out.absolute().parent, option)


def check_drawing() -> None:
    """Are the packages there that draw figures and pages?"""
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        raise typer.BadParameter(
            (
                "pages and figures need altair and vl-convert-python; install them with pip install"
                " 'unsoft[report]'"
            ),
            param_hint=_OUT,
        ) from None


def read_text(path: Path, option: str) -> str:
    """The text of a file that ``option`` names: UTF-8, and not empty."""
    try:
        found = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{path} is not text in UTF-8", param_hint=option) from None
    except OSError as problem:
        raise typer.BadParameter(f"{path} cannot be read: {problem.strerror}", param_hint=option) from None
    if not found.strip():
        raise typer.BadParameter(f"{path} is empty", param_hint=option)
    return found


def load_plugin(name: str | None) -> None:
    """Imports a module by its name, or a file by its path."""
    if name is None:
        return
    from unsoft.mechanisms.core.plugins import import_plugin

    try:
        import_plugin(name)
    except Exception as problem:  # it may do anything
        if os.environ.get("UNSOFT_TRACEBACK"):
            raise
        raise typer.BadParameter(
            f"{name} cannot be imported: {type(problem).__name__}: {problem}", param_hint="'--plugin'"
        ) from None


def read_pairs(pairs: list[str] | None, option: str) -> dict[str, Any]:
    """Names and values; numbers and true or false are read as such.

    >>> read_pairs(["repeats=16", "form=joined"], "--set")
    {'repeats': 16, 'form': 'joined'}
    """
    found = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint=f"'{option}'")
        try:
            found[name.strip()] = json.loads(text)
        except ValueError:
            found[name.strip()] = text
    return found


def read_layers(text: str) -> list[str] | dict[str, str]:
    """The argument ``layers`` of :func:`unsoft.hf.swap` from text.

    >>> read_layers("0,4-7"), read_layers("0=softmax, 8-=relu2")
    (['0', '4-7'], {'0': 'softmax', '8-': 'relu2'})
    """
    parts = [part.strip() for part in text.split(",")]
    if not any("=" in part for part in parts):
        return parts
    pairs = [part.split("=", 1) for part in parts]
    if any(len(pair) != 2 for pair in pairs):
        raise typer.BadParameter(
            f"{text!r} mixes layers with and without a mechanism", param_hint="'--layers'"
        )
    return {which.strip(): what.strip() for which, what in pairs}
