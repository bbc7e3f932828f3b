"""``unsoft bench``: how fast, how big, how right."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unsoft.cli.folder import check_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from unsoft.bench.plan import Result, Step

_INTERRUPTED = 130


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A few mechanisms, about a minute.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every case, FlexAttention too; half an hour.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Keep the results in this JSON file.")] = None,
    mechanism: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this group of steps; may be repeated.")] = None,
) -> None:
    """Measure every mechanism side by side with PyTorch's fused softmax (SDPA).

    Without an option: all mechanisms, about six minutes. An interrupted run shows and keeps what it has done.
    """
    if quick and full:
        raise typer.BadParameter("choose one of --quick and --full")
    if out is not None:
        check_file(out)
    from rich.console import Console

    from unsoft.bench.plan import FULL, QUICK, STANDARD, choose, steps

    level = QUICK if quick else FULL if full else STANDARD
    todo = choose(steps(level, mechanism), only)
    warn_if_busy()
    console = Console(width=None if Console().is_terminal else 140, highlight=False)
    results, finished = _run(todo, lambda results, finished: _keep(out, level.name, results, finished))
    _show(console, results)
    if out is not None:
        console.print(f"written to {out}")
    if not finished:
        typer.echo("unsoft: interrupted; the figures above are those measured until then", err=True)
        raise typer.Exit(_INTERRUPTED)
    if any(getattr(x, "ratio", 0) is None for x in results):
        typer.echo("unsoft: some results are wrong; their times are not shown", err=True)
        raise typer.Exit(1)


def warn_if_busy() -> None:
    """Says so if other processes will disturb what is timed."""
    from unsoft.bench.record import load

    busy, cores = load(), os.cpu_count() or 1
    if busy is not None and busy > 0.5 * cores:
        typer.echo(
            f"unsoft: this machine is busy (load {busy:.1f} on {cores} cores): expect noisy figures", err=True
        )


def _run(todo: list[Step], keep: Callable[[list[Result], bool], None]) -> tuple[list[Result], bool]:
    """The results, and whether all steps were done; what is done is kept after every step."""
    results: list[Result] = []
    try:
        with _progress(len(todo)) as announce:
            for step in todo:
                announce(step.title)
                results += step.measure()
                keep(results, False)
        keep(results, True)
    except KeyboardInterrupt:
        return results, False
    return results, True


def _keep(out: Path | None, level: str, results: list[Result], finished: bool) -> None:
    if out is not None:
        from unsoft.bench.record import record, write_json

        write_json(out, record(level, results, finished=finished))


def _show(console: Console, results: list[Result]) -> None:
    from unsoft.bench.record import machine, versions
    from unsoft.bench.table import draw, grids

    console.print(f"{machine()}; " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    for grid in grids(results):
        console.print(draw(grid))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, else a line per step. It is redrawn between measurements only, to leave the cores alone."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        count = iter(range(1, total + 1))
        yield lambda title: typer.echo(f"[{next(count)}/{total}] {title}", err=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total)
        done = iter(range(total + 1))

        def announce(title: str) -> None:
            bar.update(task, completed=next(done), description=title, refresh=True)

        yield announce
