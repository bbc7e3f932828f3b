"""What commands show: tables, progress, and what to know about the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
_WIDE = 140
"""Columns, when a file or a pipe reads."""
_HEADING = 10
"""Letters of a heading that are not broken over two lines."""


def console() -> Console:
    """Text as it is, without colours made up from it; wide where there is no window to fit."""
    from rich.console import Console

    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=_WIDE)


def show_table(
    columns: Mapping[str, str],
    rows: Sequence[Sequence[object]],
    *,
    title: str | None = None,
    box: bool = True,
    keys: int = 1,
) -> None:
    """``columns`` are titles with "left", "right", or "whole" for one that is never broken.

    What is too wide for the window is shown in several tables, one below the other, each of which begins
    with the first ``keys`` columns: nothing is cut.
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
    """The numbers of the columns of each table: as many as fit, and at least one besides the keys.

    >>> _fitting({"name": "left", "one": "right", "two": "right"}, [["cog", "1.234", "5.678"]], 18, 1)
    [[0, 1], [0, 2]]
    """
    needed = []
    for k, (name, kind) in enumerate(columns.items()):
        cells = [row[k] for row in rows]
        pieces = [word for cell in cells for word in cell.split()] if kind == "left" else cells
        heading = min(len(name), _HEADING)
        needed.append(2 + min(max(heading, *map(len, (*name.split(), *pieces, ""))), width // 2))
    first = list(range(min(keys, len(needed))))
    tables = [list(first)]
    for k in range(len(first), len(needed)):
        if len(tables[-1]) > len(first) and sum(needed[c] for c in (*tables[-1], k)) > width:
            tables.append(list(first))
        tables[-1].append(k)
    return tables


def _broken(title: str, width: int) -> str:
    """A title in lines that are no longer than its longest word or the cells below it."""
    import textwrap

    longest = max(map(len, (*title.split(), "")))
    return "\n".join(textwrap.wrap(title, max(longest, width, _HEADING)))


def has_bar() -> bool:
    """May a bar be drawn? Only where both outputs are a terminal: nothing moves while one goes to a file."""
    return sys.stdout.isatty() and sys.stderr.isatty()


@contextmanager
def progress(total: int, *, refresh: bool = True) -> Iterator[Callable[[int, str, str], None]]:
    """Yields what to call before each step, with its number, kind and title: a
    bar on a terminal, else, or if the output goes to a file, a line for each new kind.

    Without ``refresh`` the bar is drawn between steps only, to leave the cores alone.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = Console(stderr=True)
    if not has_bar():
        said: list[str] = []

        def announce(number: int, kind: str, title: str) -> None:
            if said[-1:] != [kind]:
                said.append(kind)
                typer.echo(f"[{min(number + 1, total)}/{total}] {title}", err=True)

        yield announce
        return
    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=screen, auto_refresh=refresh, transient=True) as bar:
        task = bar.add_task("", total=total)

        def update(number: int, kind: str, title: str) -> None:
            bar.update(task, completed=number, description=title, refresh=True)

        yield update


def say(line: str) -> None:
    """A line on a terminal that the next one replaces."""
    if has_bar():
        typer.echo(f"{line}\x1b[K\r", err=True, nl=False)


def note(line: str) -> None:
    """A line on standard error."""
    typer.echo(f"unsoft: {line}", err=True)


def warn_if_busy() -> None:
    """Says so if other processes will disturb what is timed."""
    from unsoft.lab.bench.machine import load

    busy, cores = load(), os.cpu_count() or 1
    if busy is not None and busy > 0.5 * cores:
        note(f"this machine is busy (load {busy:.1f} on {cores} cores): expect noisy figures")


def cell(value: Any) -> str:
    """A number or word of a table, short and harmless."""
    from unsoft.lab.report.page import number, printable

    return printable(value) if isinstance(value, str) else number(value)
