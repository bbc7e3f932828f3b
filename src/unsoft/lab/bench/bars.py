"""The figures to reach, and whether a run reached them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unsoft.lab.bench.memory import Memory
from unsoft.lab.bench.plan import Result
from unsoft.lab.bench.startup import Startup
from unsoft.lab.bench.steps import STEPS
from unsoft.lab.bench.timing import Timing, geometric_mean


@dataclass(frozen=True)
class Bar:
    """A figure to reach. ``measured`` is None if the run has no (right) result for it."""

    what: str
    limit: float
    unit: str
    measured: float | None
    scope: str = ""
    """What the figure was taken over; empty also if nothing of it was measured."""

    @property
    def passed(self) -> bool | None:
        return None if self.measured is None else self.measured <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


_RATIOS: tuple[tuple[Any, ...], ...] = (
    ("forward, geometric mean", "native", "main", "forward", geometric_mean, 0.90),
    ("forward, slowest", "native", "main", "forward", max, 1.05),
    ("forward + backward, geometric mean", "native", "main", "training", geometric_mean, 0.82),
    ("forward + backward, slowest", "native", "main", "training", max, 1.00),
    ("forward + backward, slowest", "tiled", "main", "training", max, 2.00),
    ("short queries, slowest", "native", "short", "forward", max, 1.15),
    ("small, forward, slowest", "native", "small", "forward", max, 1.15),
    ("small, forward + backward, slowest", "native", "small", "training", max, 1.15),
    ("bfloat16, forward + backward, slowest", "native", "bfloat16", "training", max, 1.10),
    ("decoding, slowest", "native", "decode", "forward", max, 1.10, "1 x 8192"),
    *(
        (f"decoding at {keys}, slowest", "native", "decode", "forward", max, limit, f"1 x {keys}")
        for keys, limit in ((64, 1.8), (256, 1.3), (1024, 1.0))
    ),
)
_LONG, _SHORT = 16384, 4096
_LINEAR = 1.25  # four times the tokens may need this much more than four times the memory


def bars(results: Sequence[Result]) -> list[Bar]:
    """Every bar, judged by the results of a run."""
    timings = [x for x in results if isinstance(x, Timing)]
    memories = [x for x in results if isinstance(x, Memory)]
    seconds = {x.what: x.seconds for x in results if isinstance(x, Startup)}
    return [
        *(_ratio_bar(timings, *row) for row in _RATIOS),
        *(_step_bar(timings, name, position, limit) for (name, position), limit in STEPS.items()),
        *_memory_bars(memories),
        Bar("cold compile of one formula", 5.0, "s", seconds.get("cold compile")),
        Bar("warm start adds to the first call", 0.005, "s", seconds.get("warm start")),
        Bar("import unsoft, beyond torch", 0.3, "s", seconds.get("import unsoft")),
    ]


def _ratio_bar(
    timings: Sequence[Timing],
    what: str,
    engine: str,
    group: str,
    mode: str,
    statistic: Callable[[Sequence[float]], float],
    limit: float,
    label: str | None = None,
) -> Bar:
    """A bar over the timings of an engine in a group; ``label`` names one workload of it."""
    rows = [x for x in timings if (x.engine, x.workload.group, x.workload.mode) == (engine, group, mode)]
    rows = [x for x in rows if label in (None, x.workload.label)]
    ratios = [x.ratio for x in rows if x.ratio is not None]
    # A wrong result must not flatter the rest: with one of them, the bar counts as not measured.
    measured = statistic(ratios) if ratios and len(ratios) == len(rows) else None
    return Bar(f"{engine}: {what}", limit, "x", measured, _scope(rows))


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
    ratios = [x.ratio for (_, length), x in own.items() if length == _LONG]
    growth = [
        x.bytes / own[mode, _SHORT].bytes
        for (mode, n), x in own.items()
        if n == _LONG and (mode, _SHORT) in own
    ]
    scope = ", ".join(dict.fromkeys(mode for mode, _ in own))
    factor = _LONG // _SHORT
    return [
        Bar(f"peak extra memory at {_LONG} tokens", 1.8, "x", max(ratios, default=None), scope),
        Bar(
            f"memory growth for {factor} times the tokens",
            factor * _LINEAR,
            "x own",
            max(growth, default=None),
            scope,
        ),
    ]
