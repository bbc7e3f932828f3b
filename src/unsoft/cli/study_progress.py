"""How ``unsoft study`` shows that it goes on: a bar in a terminal, elsewhere a line for each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unsoft.cli.terminal import has_bar

if TYPE_CHECKING:
    from unsoft.lab.study.driver import State


@contextmanager
def progress(name: str) -> Iterator[Callable[[State], None]]:
    """Yields what to tell about a study while it runs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    screen = Console(stderr=True, highlight=False, markup=False)
    columns = (
        TextColumn(name, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        # In a narrow window this is what breaks, not the numbers before it.
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
    )
    with Progress(*columns, console=screen, disable=not has_bar(), transient=True) as bar:
        number = bar.add_task("starting", total=None, left="")

        def tell(state: State) -> None:
            known = state.seconds_left is not None and state.waiting
            left = f"{_time(state.seconds_left or 0)} left" if known else ""
            shown = "; ".join(state.running[:3]) + (" ..." if len(state.running) > 3 else "")
            ended = state.done + state.failed
            bar.update(number, completed=ended, total=state.total, left=left, description=shown)
            if state.ended is not None and (state.ended.error or not has_bar()):
                screen.print(
                    f"{name}: {ended} of {state.total}, {_words(state)}{', ' * bool(left)}{left}",
                    soft_wrap=True,
                )

        yield tell


def _words(state: State) -> str:
    from unsoft.lab.study.row import words

    run = state.ended
    assert run is not None
    if run.error:
        return f"{words(run)} failed: {run.error}"
    return f"{words(run)}: " + (run.status if run.score is None else f"{run.metric} {run.score:.4f}")


def _time(seconds: float) -> str:
    """
    >>> _time(59), _time(7300)
    ('1 min', '2 h 2 min')
    """
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
