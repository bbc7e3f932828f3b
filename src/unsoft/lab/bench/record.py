"""Results of a benchmark run: the targets they are judged by, the JSON record, and tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from unsoft.files import write_json
from unsoft.lab.bench.fresh_process import Memory, Startup
from unsoft.lab.bench.machine import gpu, load, machine, versions
from unsoft.lab.bench.plan import Measured
from unsoft.lab.bench.timing import STEPS, Timing
from unsoft.lab.bench.workload import MODES, SEED
from unsoft.modules.registry import label_of


@dataclass(frozen=True)
class Bar:
    """A figure to reach. ``measured`` is None if the run has no correct result for it."""

    what: str
    limit: float
    unit: str
    measured: float | None
    scope: str = ""
    """Mechanisms and workloads of the figure; "" if nothing was measured."""

    @property
    def passed(self) -> bool | None:
        return None if self.measured is None else self.measured <= self.limit


@dataclass(frozen=True)
class _Target:
    """A limit on a statistic of the ratios of an engine in a group of workloads."""

    what: str
    group: str
    mode: str
    statistic: Callable[[Sequence[float]], float]
    limit: float
    engine: str = "native"
    label: str | None = None
    """One workload of the group; None for all."""

    def judge(self, timings: Sequence[Timing]) -> Bar:
        key = (self.engine, self.group, self.mode)
        rows = [x for x in timings if (x.engine, x.workload.group, x.workload.mode) == key]
        rows = [x for x in rows if self.label in (None, x.workload.label)]
        ratios = [x.ratio for x in rows if x.ratio is not None]
        # A wrong result must not flatter the rest: with one of them, the bar counts as not measured.
        measured = self.statistic(ratios) if ratios and len(ratios) == len(rows) else None
        return Bar(f"{self.engine}: {self.what}", self.limit, "x", measured, _scope(rows))


_TARGETS = (
    _Target("forward, geometric mean", "main", "forward", geometric_mean, 0.90),
    _Target("forward, slowest", "main", "forward", max, 1.05),
    _Target("forward + backward, geometric mean", "main", "training", geometric_mean, 0.82),
    _Target("forward + backward, slowest", "main", "training", max, 1.00),
    _Target("forward + backward, slowest", "main", "training", max, 2.00, engine="tiled"),
    _Target("short queries, slowest", "short", "forward", max, 1.15),
    _Target("small, forward, slowest", "small", "forward", max, 1.15),
    _Target("small, forward + backward, slowest", "small", "training", max, 1.15),
    _Target("bfloat16, forward + backward, slowest", "bfloat16", "training", max, 1.10),
    _Target("decoding, slowest", "decode", "forward", max, 1.10, label="1 x 8192"),
    _Target("decoding at 64, slowest", "decode", "forward", max, 1.8, label="1 x 64"),
    _Target("decoding at 256, slowest", "decode", "forward", max, 1.3, label="1 x 256"),
    _Target("decoding at 1024, slowest", "decode", "forward", max, 1.0, label="1 x 1024"),
)
_LONG, _SHORT = 16384, 4096
_LINEAR = 1.25  # four times the tokens may need this much more than four times the memory


def bars(results: Sequence[Measured]) -> list[Bar]:
    """Return every bar, judged by the results of a run."""
    timings = [x for x in results if isinstance(x, Timing)]
    seconds = {x.what: x.seconds for x in results if isinstance(x, Startup)}
    return [
        *(target.judge(timings) for target in _TARGETS),
        *(_step_bar(timings, name, position, limit) for (name, position), limit in STEPS.items()),
        *_memory_bars([x for x in results if isinstance(x, Memory)]),
        Bar("cold compile of one formula", 5.0, "s", seconds.get("cold compile")),
        Bar("warm start adds to the first call", 0.005, "s", seconds.get("warm start")),
        Bar("import unsoft, beyond torch", 0.3, "s", seconds.get("import unsoft")),
    ]


def _step_bar(timings: Sequence[Timing], name: str, position: int, limit: float) -> Bar:
    rows = [x for x in timings if (x.workload.mode, x.workload.keys, x.mechanism) == ("step", position, name)]
    ratio = rows[0].ratio if rows else None
    return Bar(f"{name}: step of decoding at {position}", limit, "x", ratio, _scope(rows))


def _scope(rows: Sequence[Timing]) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(x.mechanism for x in rows))
    who = ", ".join(names) if len(names) < 3 else f"{len(names)} mechanisms"
    labels = ", ".join(dict.fromkeys(x.workload.label.removesuffix(" causal") for x in rows))
    wrong = sum(x.ratio is None for x in rows)
    return f"{who}; {labels}" + (f"; {wrong} WRONG RESULTS" if wrong else "")


def _memory_bars(memories: Sequence[Memory]) -> list[Bar]:
    own = {(x.mode, x.length): x for x in memories if x.engine != "sdpa"}
    scope, factor = ", ".join(dict.fromkeys(mode for mode, _ in own)), _LONG // _SHORT
    ratios = [x.ratio for (_, length), x in own.items() if length == _LONG]
    growth = [
        x.bytes / own[mode, _SHORT].bytes
        for (mode, length), x in own.items()
        if length == _LONG and (mode, _SHORT) in own
    ]
    name = f"memory growth for {factor} times the tokens"
    return [
        Bar(f"peak extra memory at {_LONG} tokens", 1.8, "x", max(ratios, default=None), scope),
        Bar(name, factor * _LINEAR, "x own", max(growth, default=None), scope),
    ]


def record(level: str, results: Sequence[Measured], *, finished: bool, device: str = "cpu") -> dict[str, Any]:
    """Return a run as plain data, ready for JSON. ``finished`` is False for an interrupted run."""
    return {
        "schema": 1,
        "level": level,
        "finished": finished,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "gpu": gpu() if device == "cuda" else None,
        "threads": torch.get_num_threads(),
        "load": load(),
        "seed": SEED,
        "versions": versions(),
        "bars": [asdict(bar) | {"passed": bar.passed} for bar in bars(results)],
        "timings": [x.to_dict() for x in results if isinstance(x, Timing)],
        "memory": [asdict(x) for x in results if isinstance(x, Memory)],
        "startup": [asdict(x) for x in results if isinstance(x, Startup)],
    }


def write_figures(out: Path, figures: Any, **more: Any) -> None:
    """Write the figures of a script in ``benchmarks`` with the machine it ran on, and print the path."""
    context = {"machine": machine(), "threads": torch.get_num_threads(), "load": load()}
    write_json(out, context | {"versions": versions(), **more, "figures": figures})
    print(f"written to {out}")


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

    @property
    def columns(self) -> dict[str, str]:
        """Titles and alignments: "right" for columns of numbers."""
        return {
            name: "right" if all(_NUMBER.fullmatch(row[index]) for row in self.rows) else "left"
            for index, name in enumerate(self.header)
        }


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
