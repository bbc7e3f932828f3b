"""Results of a benchmark run: the JSON record, and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from unsoft.files import write_json
from unsoft.lab.bench.fresh_process import Memory, Startup
from unsoft.lab.bench.machine import MISSING, gpu, load, machine, versions
from unsoft.lab.bench.plan import Measured
from unsoft.lab.bench.timing import Timing
from unsoft.lab.bench.workload import MODES, SEED
from unsoft.modules.registry import label_of


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
WRONG, FAILED = "wrong", "failed"
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
    """Return all tables of a run that have a row."""
    timings = [x for x in results if isinstance(x, Timing)]
    main = [x for x in timings if x.workload.group == "main"]
    made = [
        *(_ratios([x for x in main if x.workload.mode == mode], mode) for mode in MODES),
        _other_ratios([x for x in timings if x.workload.group != "main"]),
        _memory([x for x in results if isinstance(x, Memory)]),
        _startup([x for x in results if isinstance(x, Startup)]),
    ]
    return [table for table in made if table.rows]


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
        known = sorted((x.ratio, _short(x)) for x in own if x.ratio)
        ratios = [f"{ratio:.2f} {name}" for ratio, name in known]
        wrong = ", ".join(_short(x) for x in own if x.ratio is None)
        best, worst = (ratios[0], ratios[-1]) if ratios else ("", "")
        ends = [best, f"{WRONG}: {wrong}" if wrong else worst]
        shape = [f"{workload.batch} x {workload.heads}", workload.label]
        sdpa = _milliseconds(next(x for x in here if x.engine == "sdpa"))
        rows.append([workload.group, _MODE_TITLES[workload.mode], *shape, *ends, sdpa])
    header = ["group", "mode", "batch x heads", "tokens", "fastest", "slowest", "SDPA"]
    return TextTable("special shapes, time relative to SDPA", header, rows)


def _memory(memories: Sequence[Memory]) -> TextTable:
    rows = [
        [x.engine, label_of(x.mechanism), _MODE_TITLES[x.mode], str(x.length)]
        + [f"{x.bytes / 2**20:.1f} MB", f"{x.ratio:.2f}"]
        for x in memories
    ]
    header = ["engine", "mechanism", "mode", "tokens", "memory", "to SDPA"]
    return TextTable("peak extra memory, 2 heads", header, rows)


def _startup(startups: Sequence[Startup]) -> TextTable:
    return TextTable("start-up", ["what", "time"], [[x.what, _duration(x.seconds)] for x in startups])


def _short(timing: Timing) -> str:
    """Return the mechanism, or the package if it is not ours, since all of those compute softmax."""
    return label_of(timing.mechanism) if timing.engine in _ENGINES else timing.engine


def _milliseconds(timing: Timing) -> str:
    return _fault(timing) if timing.seconds is None else f"{timing.seconds * 1e3:.3g} ms"


def _fault(timing: Timing) -> str:
    return FAILED if timing.problem else WRONG


def _duration(seconds: float) -> str:
    """Return a time, short ones in milliseconds.

    >>> _duration(0.0042), _duration(2.5)
    ('4.2 ms', '2.50 s')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
