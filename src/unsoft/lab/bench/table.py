"""Tables of benchmark results: rows of text, drawn by rich."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unsoft.lab.bench.fresh_process import Memory, Startup
from unsoft.lab.bench.plan import Measured
from unsoft.lab.bench.record import Bar, bars
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
class TextTable:
    """A table of texts."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def draw(self) -> Table:
        """Return a rich table."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        styles = {"pass": "green", "not measured": "dim", MISSING: "dim"}
        styles |= dict.fromkeys(("FAIL", WRONG, FAILED), "bold red")
        table = Table(title=self.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for index, name in enumerate(self.header):
            is_number = all(_NUMBER.fullmatch(row[index]) for row in self.rows)
            table.add_column(name, justify="right" if is_number else "left")
        for row in self.rows:
            table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
        return table


def tables(results: Sequence[Measured]) -> list[TextTable]:
    """Return all tables of a run that have a row; the bars come last."""
    timings = [x for x in results if isinstance(x, Timing)]
    main = [x for x in timings if x.workload.group == "main"]
    made = [
        *(_ratios([x for x in main if x.workload.mode == mode], mode) for mode in MODES),
        _other_ratios([x for x in timings if x.workload.group != "main"]),
        _memory([x for x in results if isinstance(x, Memory)]),
        _startup([x for x in results if isinstance(x, Startup)]),
        _bars(bars(results)),
    ]
    return [table for table in made if table.rows]


def _bars(judged: Sequence[Bar]) -> TextTable:
    """Show every bar that the run touched, with its measured value and verdict."""
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
    return TextTable("figures to reach", ["what", "measured", "bar", "verdict", "scope"], rows)


def _ratios(timings: Sequence[Timing], mode: str) -> TextTable:
    """Show one row for each contender, one column for each workload."""
    labels = list(dict.fromkeys(x.workload.label for x in timings))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for x in timings:
        if x.engine != "sdpa":
            contender = cells.setdefault((x.engine, label_of(x.mechanism)), {})
            contender[x.workload.label] = _fault(x) if x.ratio is None else f"{x.ratio:.2f}"
    rows = [[*who, *(row.get(label, "") for label in labels)] for who, row in cells.items()]
    peers = {row[0] for row in rows}
    if "dense PyTorch" in peers and _X_TRANSFORMERS[0] not in peers:
        rows.append([*_X_TRANSFORMERS, MISSING, *[""] * (len(labels) - 1)])
    sdpa = {x.workload.label: x for x in timings if x.engine == "sdpa"}
    if rows:
        rows.append(["SDPA", "softmax", *(_milliseconds(sdpa[label]) for label in labels)])
    title = f"{_MODE_TITLES[mode]}, time relative to SDPA"
    return TextTable(title, ["engine", "mechanism", *labels], rows)


def _other_ratios(timings: Sequence[Timing]) -> TextTable:
    """Show one row for each workload with the extremes over the mechanisms."""
    rows = []
    for workload in dict.fromkeys(x.workload for x in timings):
        here = [x for x in timings if x.workload == workload]
        own = [x for x in here if x.engine != "sdpa"]
        ratios = [
            f"{ratio:.2f} {name}" for ratio, name in sorted((x.ratio, _short(x)) for x in own if x.ratio)
        ]
        wrong = ", ".join(_short(x) for x in own if x.ratio is None)
        best, worst = (ratios[0], ratios[-1]) if ratios else ("", "")
        rows.append(
            [
                workload.group,
                _MODE_TITLES[workload.mode],
                f"{workload.batch} x {workload.heads}",
                workload.label,
                best,
                f"{WRONG}: {wrong}" if wrong else worst,
                _milliseconds(next(x for x in here if x.engine == "sdpa")),
            ]
        )
    header = ["group", "mode", "batch x heads", "tokens", "fastest", "slowest", "SDPA"]
    return TextTable("special shapes, time relative to SDPA", header, rows)


def _memory(memories: Sequence[Memory]) -> TextTable:
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
    header = ["engine", "mechanism", "mode", "tokens", "memory", "to SDPA"]
    return TextTable("peak extra memory, 2 heads", header, rows)


def _startup(startups: Sequence[Startup]) -> TextTable:
    return TextTable("start-up", ["what", "time"], [[x.what, _quantity(x.seconds, "s")] for x in startups])


def _short(timing: Timing) -> str:
    """Return the mechanism, or the package if it is not ours, since all of those compute softmax."""
    return label_of(timing.mechanism) if timing.engine in _ENGINES else timing.engine


def _milliseconds(timing: Timing) -> str:
    return _fault(timing) if timing.seconds is None else f"{timing.seconds * 1e3:.3g} ms"


def _fault(timing: Timing) -> str:
    return FAILED if timing.problem else WRONG


def _quantity(value: float | None, unit: str) -> str:
    """Return a number with its unit; short times in milliseconds.

    >>> _quantity(0.0042, "s"), _quantity(2.5, "s"), _quantity(0.8, "x"), _quantity(None, "x")
    ('4.2 ms', '2.50 s', '0.80 x', '-')
    """
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if unit == "s" and value < 0.1 else f"{value:.2f} {unit}"
