"""Options and arguments that several commands share, checked before any work starts."""

from __future__ import annotations

import json
import os
import re
import tempfile
import webbrowser
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from unsoft.cli.completion import complete_model

_OUT = "'--out'"


def unset(help: str, *flags: str, **more: Any) -> Any:
    """Return an option whose help shows no default, since leaving it out means something else."""
    return typer.Option(*flags, help=help, show_default=False, **more)


def wrong(problem: str, hint: str) -> typer.BadParameter:
    """Return a usage error; ``hint`` is the option or argument in quotes, such as "'--out'"."""
    return typer.BadParameter(problem, param_hint=hint)


def path_option(help: str, *flags: str, show_default: bool = True) -> Any:
    """Return an option for a path to write to. An empty path is an error: it means the current folder."""
    return typer.Option(*flags, help=help, parser=_path, metavar="PATH", show_default=show_default)


def _path(text: str | Path) -> Path:
    if not str(text):
        raise typer.BadParameter("a path cannot be empty; the current folder is '.'")
    return Path(text)


Plugin = Annotated[
    str | None, unset("A module or a .py file to import first: it registers tasks or mechanisms of your own.")
]
Model = Annotated[
    str,
    typer.Argument(help="smollm2, minilm, a folder, or a name on the hub.", autocompletion=complete_model),
]
LanguageModel = Annotated[
    str, typer.Argument(help="smollm2, a folder, or a name on the hub.", autocompletion=complete_model)
]
MechanismOptions = Annotated[
    list[str] | None, unset("A keyword of the mechanism: where=mass; may be repeated.", "--option")
]
MechanismRate = Annotated[float, typer.Option(help="Learning rate of the mechanism's own parameters.")]
Start = Annotated[
    str, typer.Option(help="Initial values of learnable mechanisms: open (close to softmax) or paper.")
]
Settings = Annotated[
    list[str] | None,
    unset("A setting of the run, steps=300, or of the task, repeats=16; may be repeated.", "--set"),
]

Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON instead of tables; notes go to stderr.")
]
ToFile = Annotated[Path | None, path_option("Write the result to this JSON file.", show_default=False)]
ToRecords = Annotated[
    Path | None,
    path_option("Write records (JSON, CSV) and a page (HTML) to this folder.", show_default=False),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would run and how long it takes, and stop.")
]

Layers = Annotated[
    str | None,
    typer.Option(
        "--only-layers", help="Only these layers: 0,4-7,-1; or what each of them gets: 0=softmax,8-=relu2."
    ),
]
KeepFirstLast = Annotated[
    bool, typer.Option("--keep-first-last", help="Softmax in the first and last layer.")
]


def open_page(path: Path, *, wanted: bool) -> None:
    """Open a page in the browser if that is ``wanted``; print a note where there is none."""
    if wanted and not webbrowser.open(path.absolute().as_uri()):
        typer.echo(f"unsoft: no browser found; open {path} yourself", err=True)


def folder_name(*words: object) -> Path:
    """Return the folder of a run in runs/, with characters that file names cannot have replaced.

    >>> folder_name("census", "s/n + 1", 0)
    PosixPath('runs/census-s_n_+_1-0')
    """
    return Path("runs") / re.sub(r"[^\w.+()-]", "_", "-".join(map(str, words)))


def check_folder(out: Path, option: str = _OUT) -> None:
    """Raise BadParameter unless files can be written in ``out``, which need not exist."""
    nearest = out.absolute()
    try:
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir():
            raise wrong(f"{out} cannot be made a folder: {nearest} is a file", option)
        descriptor, tried = tempfile.mkstemp(dir=nearest, prefix=".unsoft-", suffix=".tmp")
        # os.access is not enough: root has permission everywhere, even on read-only file systems.
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)
            os.unlink(tried)
    except OSError as problem:
        raise wrong(f"{out} cannot be written: {problem.strerror}", option) from None


def prepare_folder(out: Path) -> None:
    """Create the folder ``out``, or raise BadParameter."""
    check_folder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise wrong(f"{out} cannot be made a folder: {problem.strerror}", _OUT) from None


def check_file(out: Path | None, option: str = _OUT) -> None:
    """Raise BadParameter unless the file ``out`` can be written or replaced; its folder must exist."""
    if out is None:
        return
    if not out.absolute().parent.is_dir():
        raise wrong(f"the folder {out.absolute().parent} does not exist", option)
    if out.is_dir():
        raise wrong(f"{out} is a folder, not a file", option)
    check_folder(out.absolute().parent, option)


def write_result(content: Any, path: Path | None, *, as_json: bool) -> None:
    """Print plain data if ``--json`` was given, and write it to the file of ``--to``."""
    from unsoft.files import write_json

    if as_json:
        typer.echo(json.dumps(content, indent=1))
    if path is not None:
        write_json(path, content)
        typer.echo(f"written to {path}", err=as_json)


def check_drawing() -> None:
    """Raise BadParameter unless the packages for figures and pages are installed."""
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        problem = "pages and figures need altair and vl-convert-python; pip install 'unsoft[report]'"
        raise wrong(problem, _OUT) from None


def read_text(path: Path, option: str) -> str:
    """Return the text of a file, which must be UTF-8 and not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise wrong(f"{path} is not text in UTF-8", option) from None
    except OSError as problem:
        raise wrong(f"{path} cannot be read: {problem.strerror}", option) from None
    if not text.strip():
        raise wrong(f"{path} is empty", option)
    return text


def load_plugin(name: str | None) -> None:
    """Import a module by name or a .py file by path, so that it registers tasks or mechanisms."""
    if name is None:
        return
    from unsoft.modules.plugins import import_plugin

    try:
        import_plugin(name)
    except Exception as problem:  # a plug-in can raise anything
        if os.environ.get("UNSOFT_TRACEBACK"):
            raise
        raise wrong(f"{name} cannot be imported: {type(problem).__name__}: {problem}", "'--plugin'") from None


def read_pairs(pairs: list[str] | None, option: str) -> dict[str, Any]:
    """Return NAME=VALUE pairs as a dict; numbers, true and false are parsed as JSON.

    >>> read_pairs(["repeats=16", "form=joined"], "--set")
    {'repeats': 16, 'form': 'joined'}
    """
    values = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals:
            raise wrong(f"{pair!r} is not NAME=VALUE", f"'{option}'")
        try:
            values[name.strip()] = json.loads(text)
        except ValueError:
            values[name.strip()] = text
    return values


def settings(context: typer.Context, kind: Any) -> dict[str, Any]:
    """Return the options of a command that are fields of a dataclass; those left out keep its defaults."""
    given = {field.name: context.params.get(field.name) for field in fields(kind)}
    return {name: value for name, value in given.items() if value is not None}


def read_settings(pairs: list[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a run, and the knobs of its task: all other names.

    >>> read_settings(["steps=300", "repeats=16"])
    ({'steps': 300}, {'repeats': 16})
    """
    from unsoft.lab.training import Spec

    own = {field.name for field in fields(Spec)} - {"task", "mechanism", "knobs", "options"}
    given = read_pairs(pairs, "--set")
    knobs = {name: value for name, value in given.items() if name not in own}
    return {name: value for name, value in given.items() if name in own}, knobs


def read_layers(text: str) -> list[str] | dict[str, str]:
    """Parse the argument ``layers`` of :func:`unsoft.hf.swap`.

    >>> read_layers("0,4-7"), read_layers("0=softmax, 8-=relu2")
    (['0', '4-7'], {'0': 'softmax', '8-': 'relu2'})
    """
    parts = [part.strip() for part in text.split(",")]
    if not any("=" in part for part in parts):
        return parts
    pairs = [part.split("=", 1) for part in parts]
    if any(len(pair) != 2 for pair in pairs):
        raise wrong(f"{text!r} mixes layers with and without a mechanism", "'--only-layers'")
    return {which.strip(): what.strip() for which, what in pairs}


def load_reader(model: str, length: int, instead: str) -> tuple[Any, Any, int]:
    """Return a model, its tokenizer and the number of tokens to read at a time, at most ``length``.

    ``instead`` names the Python function to use for a model without a tokenizer.
    """
    from unsoft.hf.models import load_model

    network, tokenizer = load_model(model)
    if tokenizer is None:
        raise wrong(f"{model} has no tokenizer, so it cannot read text; use {instead} from Python", "'MODEL'")
    return network, tokenizer, min(length, getattr(network.config, "max_position_embeddings", None) or length)
