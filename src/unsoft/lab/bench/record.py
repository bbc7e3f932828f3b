"""The JSON record of a benchmark run, and the targets that its results are judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from unsoft.files import write_json
from unsoft.lab.bench.fresh_process import Memory, Startup
from unsoft.lab.bench.machine import gpu, load, machine, versions
from unsoft.lab.bench.plan import Measured
from unsoft.lab.bench.timing import STEPS, Timing, geometric_mean
from unsoft.lab.bench.workload import SEED


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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


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
    kinds = {"timings": Timing, "memory": Memory, "startup": Startup}
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
        "bars": [bar.to_dict() for bar in bars(results)],
        **{key: [x.to_dict() for x in results if isinstance(x, kind)] for key, kind in kinds.items()},
    }


def write_figures(out: Path, figures: Any, **more: Any) -> None:
    """Write the figures of a script in ``benchmarks`` with the machine it ran on, and print the path."""
    context = {"machine": machine(), "threads": torch.get_num_threads(), "load": load()}
    write_json(out, context | {"versions": versions(), **more, "figures": figures})
    print(f"written to {out}")
