"""``unsoft cache``: compiled formulas, models read from another format and kept measurements on disk."""

from __future__ import annotations

import shutil

import typer

command = typer.Typer(help="Compiled formulas, models and measurements on disk.", rich_markup_mode=None)


@command.command()
def info() -> None:
    """Show what is kept where, how many there are, and their size."""
    from unsoft.compare.store import Store, default_folder
    from unsoft.engines.native.compiler import cache_directory, models_directory
    from unsoft.engines.triton.tile_sizes import tuned, tuned_file

    directory = cache_directory()
    sizes = [file.stat().st_size for file in directory.glob("*.so")]
    typer.echo(f"{directory}: {len(sizes)} compiled libraries, {sum(sizes) / 2**20:.1f} MB")
    typer.echo(f"{tuned_file()}: {len(tuned())} tile sizes of unsoft tune")
    models = models_directory()
    size = sum(file.stat().st_size for file in models.glob("*/*"))
    typer.echo(f"{models}: {len(list(models.glob('*')))} models, {size / 2**20:.1f} MB")
    kept = Store(default_folder())
    size = sum(file.stat().st_size for file in kept.files())
    typer.echo(f"{kept.folder}: {len(kept.files())} results of unsoft compare, {size / 2**20:.1f} MB")


@command.command()
def clear() -> None:
    """Delete all of it; what is needed again is made again."""
    from unsoft.compare.store import Store, default_folder
    from unsoft.engines.native.compiler import cache_directory, clear_cache, models_directory
    from unsoft.engines.triton.source import generated_folder
    from unsoft.engines.triton.tile_sizes import tuned, tuned_file

    typer.echo(f"{cache_directory()}: {clear_cache()} compiled libraries deleted")
    typer.echo(f"{tuned_file()}: {len(tuned())} tile sizes of unsoft tune deleted")
    tuned_file().unlink(missing_ok=True)
    shutil.rmtree(generated_folder(), ignore_errors=True)
    models = models_directory()
    count = len(list(models.glob("*")))
    shutil.rmtree(models, ignore_errors=True)
    typer.echo(f"{models}: {count} models deleted")
    typer.echo(f"{default_folder()}: {Store(default_folder()).clear()} results of unsoft compare deleted")
