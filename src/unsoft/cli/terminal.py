"""Terminal output of commands: tables, progress bars and notes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from unsoft.lab.compare.jobs import Job

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
_WIDE = 140
"""Columns, when the output is a file or a pipe."""
_HEADING = 10
"""Headings up to this length stay on one line."""


def console() -> Console:
    """Return a console that prints text unchanged, without highlighting; wide if it is not a terminal."""
    from rich.console import Console

    screen = Console(highlight=False, markup=False)
    return screen if screen.is_terminal else Console(highlight=False, markup=False, width=_WIDE)


def show_table(
    columns: Mapping[str, str],
    rows: Sequence[Sequence[object]],
    *,
    title: str | None = None,
    box: bool = True,
    keys: int = 1,
) -> None:
    """Print a table. ``columns`` maps titles to "left", "right", or "whole" for a column that never wraps.

    A table wider than the window is split into several, each starting with the first ``keys`` columns.
    """
    from rich import box as boxes
    from rich.table import Table
    from rich.text import Text

    screen = console()
    texts = [[str(cell) for cell in row] for row in rows]
    for part in _fitting(columns, texts, screen.width, keys):
        table = Table(box=boxes.SIMPLE_HEAD, pad_edge=box, title=title, title_justify="left")
        for k in part:
            name, kind = list(columns.items())[k]
            broken = kind == "left"
            heading = name if broken else _broken(name, max((len(row[k]) for row in texts), default=0))
            justify: Any = "right" if kind == "right" else "left"
            table.add_column(Text(heading), justify=justify, no_wrap=not broken, overflow="fold")
        for row in texts:
            table.add_row(*(Text(row[k]) for k in part))
        screen.print(table)
        title = None


def _fitting(
    columns: Mapping[str, str], rows: Sequence[Sequence[str]], width: int, keys: int
) -> list[list[int]]:
    """Return the column indices of each table: as many as fit, and at least one besides the keys.

    >>> _fitting({"name": "left", "one": "right", "two": "right"}, [["cog", "1.234", "5.678"]], 22, 1)
    [[0, 1], [0, 2]]
    """
    needed = []
    for k, (name, kind) in enumerate(columns.items()):
        cells = [row[k] for row in rows]
        pieces = [word for cell in cells for word in cell.split()] if kind == "left" else cells
        heading = min(len(name), _HEADING)
        # Two of padding and one between columns: a table that is too wide by one loses digits of its numbers.
        needed.append(3 + min(max(heading, *map(len, (*name.split(), *pieces, ""))), width // 2))
    first = list(range(min(keys, len(needed))))
    tables = [list(first)]
    for k in range(len(first), len(needed)):
        if len(tables[-1]) > len(first) and sum(needed[c] for c in (*tables[-1], k)) >= width:
            tables.append(list(first))
        tables[-1].append(k)
    return tables


def _broken(title: str, width: int) -> str:
    """Return a title wrapped to its longest word or the width of the cells below it."""
    import textwrap

    longest = max(map(len, (*title.split(), "")))
    return "\n".join(textwrap.wrap(title, max(longest, width, _HEADING)))


def has_bar() -> bool:
    """Return True if a progress bar may be drawn: only if stdout and stderr are both terminals."""
    return sys.stdout.isatty() and sys.stderr.isatty()


@contextmanager
def progress(total: int, *, refresh: bool = True) -> Iterator[Callable[..., None]]:
    """Yield a function to call before each step with its number, kind and title, and a new total if it grew.

    It draws a bar on a terminal; elsewhere it prints a line for each new kind. Without ``refresh`` the bar is
    drawn between steps only, so that it does not disturb timings.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = Console(stderr=True)
    if not has_bar():
        last = ""

        def announce(number: int, kind: str, title: str, of: int = total) -> None:
            nonlocal last
            if kind != last:
                last = kind
                typer.echo(f"[{min(number + 1, of)}/{of}] {title}", err=True)

        yield announce
        return
    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=screen, auto_refresh=refresh, transient=True) as bar:
        task = bar.add_task("", total=total)

        def update(number: int, kind: str, title: str, of: int = total) -> None:
            bar.update(task, completed=number, total=of, description=title, refresh=True)

        yield update


def say(line: str) -> None:
    """Print a line on a terminal that the next one overwrites."""
    if has_bar():
        typer.echo(f"{line}\x1b[K\r", err=True, nl=False)


def note(line: str) -> None:
    """Print a line on standard error."""
    typer.echo(f"unsoft: {line}", err=True)


def interrupted(line: str) -> typer.Exit:
    """Print a note and return the exit after Ctrl-C, to raise."""
    note(f"interrupted; {line}. Rerun the same command to resume")
    return typer.Exit(INTERRUPTED)


def print_json(content: Any) -> None:
    """Print plain data as JSON."""
    typer.echo(json.dumps(content, indent=1))


def print_plan(jobs: Sequence[Job], *, as_json: bool) -> None:
    """Print the number of measurements and their time, for ``--dry-run``."""
    seconds = sum(job.expected for job in jobs)
    if as_json:
        print_json({"measurements": len(jobs), "seconds": seconds})
    else:
        typer.echo(f"{len(jobs)} measurements, about {seconds / 60:.1f} minutes of one core; fewer if stored")


@contextmanager
def resumable() -> Iterator[None]:
    """Exit with the code of Ctrl-C when training was interrupted and saved; a note says how to resume."""
    from unsoft.errors import Interrupted

    try:
        yield
    except Interrupted as stopped:
        if os.environ.get("RANK", "0") == "0":  # processes of torchrun are stopped together
            note(str(stopped))
        raise typer.Exit(INTERRUPTED) from None


def warn_if_busy() -> None:
    """Print a note if the load of the machine will disturb timings."""
    from unsoft.lab.bench.machine import load

    busy, cores = load(), os.cpu_count() or 1
    if busy is not None and busy > 0.5 * cores:
        note(f"this machine is busy (load {busy:.1f} on {cores} cores): expect noisy figures")


def cell(value: Any) -> str:
    """Return a table cell as short text without control characters."""
    from unsoft.lab.report.page import number, printable

    return printable(value) if isinstance(value, str) else number(value)
