"""Results as tables: first plain rows of text, then drawn by rich."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unsoft.lab.bench.bars import Bar, bars
from unsoft.lab.bench.memory import Memory
from unsoft.lab.bench.plan import Result
from unsoft.lab.bench.startup import Startup
from unsoft.lab.bench.timing import Timing
from unsoft.lab.bench.workload import MODES
from unsoft.modules.registry import label_of

if TYPE_CHECKING:
    from rich.table import Table

_MODE_TITLES = {"forward": "forward", "training": "forward + backward", "step": "step of decoding"}
WRONG, FAILED, MISSING = "wrong", "failed", "not installed"
_NUMBER = re.compile(rf"([\d.]+( \w+)?)?|-|{WRONG}|{FAILED}|{MISSING}")
_ENGINES = ("native", "tiled", "triton")
_X_TRANSFORMERS = ["x-transformers", "cog"]


@dataclass(frozen=True)
class Grid:
    """A table of texts."""

    title: str
    header: list[str]
    rows: list[list[str]]


def grids(results: Sequence[Result]) -> list[Grid]:
    """All tables of a run, those without a row left out; the bars come last."""
    timings = [x for x in results if isinstance(x, Timing)]
    main = [x for x in timings if x.workload.group == "main"]
    rest = [x for x in timings if x.workload.group != "main"]
    tables = [
        *(_ratios(f"{_MODE_TITLES[mode]}, time relative to SDPA", main, mode) for mode in MODES),
        _other_ratios(rest),
        _memory([x for x in results if isinstance(x, Memory)]),
        _startup([x for x in results if isinstance(x, Startup)]),
        bars_grid(bars(results)),
    ]
    return [table for table in tables if table.rows]


def bars_grid(judged: Sequence[Bar]) -> Grid:
    """Every bar that the run touched, with its measured value and the verdict."""
    verdicts = {True: "pass", False: "FAIL", None: "not measured"}
    rows = [
        [
            bar.what,
            _quantity(bar.measured, bar.unit),
            f"<= {_quantity(bar.limit, bar.unit)}",
            verdicts[bar.passed],
            bar.scope,
        ]
        for bar in judged
        if bar.measured is not None or bar.scope
    ]
    return Grid("figures to reach", ["what", "measured", "bar", "verdict", "scope"], rows)


def draw(grid: Grid) -> Table:
    """A rich table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    styles = {"pass": "green", "not measured": "dim", MISSING: "dim"}
    styles |= dict.fromkeys(("FAIL", WRONG, FAILED), "bold red")
    table = Table(title=grid.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for place, name in enumerate(grid.header):
        is_number = all(_NUMBER.fullmatch(row[place]) for row in grid.rows)
        table.add_column(name, justify="right" if is_number else "left")
    for row in grid.rows:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    return table


def _ratios(title: str, timings: Sequence[Timing], mode: str) -> Grid:
    """One row for each contender, one column for each workload."""
    timings = [x for x in timings if x.workload.mode == mode]
    labels = list(dict.fromkeys(x.workload.label for x in timings))
    cells = {(_who(x), x.workload.label): _cell(x) for x in timings}
    whos = dict.fromkeys(_who(x) for x in timings if x.engine != "sdpa")
    rows = [[*who, *(cells.get((who, label), "") for label in labels)] for who in whos]
    peers = {row[0] for row in rows}
    if "dense PyTorch" in peers and _X_TRANSFORMERS[0] not in peers:
        rows.append([*_X_TRANSFORMERS, MISSING, *[""] * (len(labels) - 1)])
    milliseconds = {x.workload.label: x for x in timings if x.engine == "sdpa"}
    if rows:
        rows.append(["SDPA", "softmax", *(_milliseconds(milliseconds[label]) for label in labels)])
    return Grid(title, ["engine", "mechanism", *labels], rows)


def _other_ratios(timings: Sequence[Timing]) -> Grid:
    """One row for each workload with the extremes over the mechanisms."""
    rows = []
    for workload in dict.fromkeys(x.workload for x in timings):
        here = [x for x in timings if x.workload == workload]
        own = [x for x in here if x.engine != "sdpa"]
        ratios = sorted((x.ratio, _short(x)) for x in own if x.ratio is not None)
        wrong = [_short(x) for x in own if x.ratio is None]
        best, worst = (
            (f"{ratio:.2f} {name}" for ratio, name in (ratios[0], ratios[-1])) if ratios else ("", "")
        )
        what = [
            workload.group,
            _MODE_TITLES[workload.mode],
            f"{workload.batch} x {workload.heads}",
            workload.label,
        ]
        sdpa = _milliseconds(next(x for x in here if x.engine == "sdpa"))
        rows.append([*what, best, f"{WRONG}: {', '.join(wrong)}" if wrong else worst, sdpa])
    header = ["group", "mode", "batch x heads", "tokens", "fastest", "slowest", "SDPA"]
    return Grid("special shapes, time relative to SDPA", header, rows)


def _memory(memories: Sequence[Memory]) -> Grid:
    rows = [
        [
            x.engine,
            label_of(x.mechanism),
            _MODE_TITLES[x.mode],
            str(x.length),
            f"{x.bytes / 2**20:.1f} MB",
            f"{x.ratio:.2f}",
        ]
        for x in memories
    ]
    return Grid(
        "peak extra memory, 2 heads", ["engine", "mechanism", "mode", "tokens", "memory", "to SDPA"], rows
    )


def _startup(startups: Sequence[Startup]) -> Grid:
    return Grid("start-up", ["what", "time"], [[x.what, _quantity(x.seconds, "s")] for x in startups])


def _who(timing: Timing) -> tuple[str, str]:
    return timing.engine, label_of(timing.mechanism)


def _short(timing: Timing) -> str:
    """The mechanism; of peers the name, since all of them compute softmax."""
    return label_of(timing.mechanism) if timing.engine in _ENGINES else timing.engine


def _cell(timing: Timing) -> str:
    return _fault(timing) if timing.ratio is None else f"{timing.ratio:.2f}"


def _milliseconds(timing: Timing) -> str:
    return _fault(timing) if timing.seconds is None else f"{timing.seconds * 1e3:.3g} ms"


def _fault(timing: Timing) -> str:
    return FAILED if timing.problem else WRONG


def _quantity(value: float | None, unit: str) -> str:
    """A number with its unit; short times in milliseconds.

    >>> _quantity(0.0042, "s"), _quantity(2.5, "s"), _quantity(0.8, "x"), _quantity(None, "x")
    ('4.2 ms', '2.50 s', '0.80 x', '-')
    """
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if unit == "s" and value < 0.1 else f"{value:.2f} {unit}"
