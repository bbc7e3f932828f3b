"""``unsoft cache``: the compiled formulas on disk."""

from __future__ import annotations

import typer

app = typer.Typer(help="The compiled formulas on disk.", rich_markup_mode=None)


@app.command()
def info() -> None:
    """Show where compiled formulas are kept, how many there are, and their size."""
    from unsoft.engines.native.compiler import cache_directory

    directory = cache_directory()
    sizes = [file.stat().st_size for file in directory.glob("*.so")]
    typer.echo(f"{directory}: {len(sizes)} compiled libraries, {sum(sizes) / 2**20:.1f} MB")


@app.command()
def clear() -> None:
    """Delete all compiled formulas; they are compiled again when needed."""
    from unsoft.engines.native.compiler import cache_directory, clear_cache

    typer.echo(f"{cache_directory()}: {clear_cache()} compiled libraries deleted")
