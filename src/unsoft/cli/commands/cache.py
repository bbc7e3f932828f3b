"""``unsoft cache``: compiled formulas, converted model files and stored measurements on disk."""

from __future__ import annotations

import shutil
from typing import Any

import typer

from unsoft.cli.arguments import AsJson, wrong
from unsoft.cli.terminal import print_json

command = typer.Typer(
    help="""Compiled formulas, models and measurements on disk.

    \b
    Examples:
      unsoft cache info
      unsoft cache clear
    """,
    rich_markup_mode=None,
)


def _check_folders() -> None:
    """Raise a usage error if a folder that the environment names is a file, or would be inside one."""
    from unsoft.cache_dir import cache_directory
    from unsoft.lab.compare.store import default_folder

    folders = {"UNSOFT_CACHE_DIR": cache_directory(), "UNSOFT_COMPARE_DIR": default_folder()}
    for variable, folder in folders.items():
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not nearest.is_dir():
            problem = f"{folder} is not a folder: {nearest} is a file; name a folder, or unset the variable"
            raise wrong(problem, variable)


@command.command()
def info(as_json: AsJson = False) -> None:
    """Show the folders, the number of files and their size.

    \b
    Examples:
      unsoft cache info
      unsoft cache info --json
    """
    from unsoft.cache_dir import cache_directory, models_directory
    from unsoft.engines.native.compiler import unfinished_files
    from unsoft.lab.compare.store import AnswerStore, default_folder

    _check_folders()
    libraries, models, kept = cache_directory(), models_directory(), AnswerStore(default_folder())
    kinds = [
        (libraries, list(libraries.glob("*.so")), "compiled libraries", None),
        (libraries, unfinished_files(), "unfinished libraries", None),
        (models, list(models.glob("*/*")), "models", len(list(models.glob("*")))),
        (kept.folder, kept.files(), "results of unsoft compare", None),
    ]
    records: list[dict[str, Any]] = [
        {
            "folder": str(folder),
            "what": what,
            "count": len(files) if count is None else count,
            "bytes": sum(file.stat().st_size for file in files),
        }
        for folder, files, what, count in kinds
    ]
    if as_json:
        print_json(records)
        return
    for row in records:
        typer.echo(f"{row['folder']}: {row['count']} {row['what']}, {row['bytes'] / 2**20:.1f} MB")


@command.command()
def clear() -> None:
    """Delete everything; it is created again on demand.

    \b
    Examples:
      unsoft cache clear
      UNSOFT_CACHE_DIR=/tmp/mine unsoft cache clear
    """
    from unsoft.cache_dir import cache_directory, models_directory
    from unsoft.engines.native.compiler import clear_cache
    from unsoft.engines.triton.codegen import generated_folder
    from unsoft.lab.compare.store import AnswerStore, default_folder

    _check_folders()
    typer.echo(f"{cache_directory()}: {clear_cache()} compiled libraries deleted")
    shutil.rmtree(generated_folder(), ignore_errors=True)
    models = models_directory()
    count = len(list(models.glob("*")))
    shutil.rmtree(models, ignore_errors=True)
    typer.echo(f"{models}: {count} models deleted")
    kept = AnswerStore(default_folder())
    typer.echo(f"{kept.folder}: {kept.clear()} results of unsoft compare deleted")
