"""What is kept of a run: results, bars, and the machine, versions and seed they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from unsoft.files import write_json
from unsoft.lab.bench.bars import bars
from unsoft.lab.bench.machine import gpu, load, machine, versions
from unsoft.lab.bench.memory import Memory
from unsoft.lab.bench.plan import Result
from unsoft.lab.bench.startup import Startup
from unsoft.lab.bench.timing import Timing
from unsoft.lab.bench.workload import SEED


def record(level: str, results: Sequence[Result], *, finished: bool, device: str = "cpu") -> dict[str, Any]:
    """A run as plain data, ready for JSON. ``finished`` is False for a run that was interrupted."""
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
    """What a script of the folder ``benchmarks`` found, with the machine it ran on; says where it is."""
    context = {"machine": machine(), "threads": torch.get_num_threads(), "load": load()}
    write_json(out, context | {"versions": versions(), **more, "figures": figures})
    print(f"written to {out}")
