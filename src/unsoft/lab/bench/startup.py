"""What the first call costs: importing the library, compiling a formula, finding it compiled.

All in fresh processes.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from unsoft.lab.bench.probe import run_probe

_IMPORT = """
import time
start = time.perf_counter(); import torch
middle = time.perf_counter(); import unsoft; unsoft.attention, unsoft.nn  # names are imported on first use
end = time.perf_counter()
import json; print(json.dumps({"torch": middle - start, "unsoft": end - middle}))
"""

# PyTorch is warmed up first: its own first call is not ours to count. Importing is timed above.
_FIRST_CALL = """
import json, time, torch, unsoft
unsoft.attention, unsoft.nn
q = torch.randn(1, 8, 64, 64)
for _ in range(3):
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
seconds = []
for _ in range(6):
    start = time.perf_counter(); unsoft.attention(q, q, q, "cog", engine="native")
    seconds.append(time.perf_counter() - start)
print(json.dumps({"added": seconds[0] - min(seconds[1:])}))
"""


@dataclass(frozen=True)
class Startup:
    """One cost of starting, in seconds: the smallest of ``runs`` processes."""

    what: str
    seconds: float
    runs: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_import(runs: int) -> list[Startup]:
    """The time of ``import torch``, and what ``import unsoft`` adds to it."""
    taken = [run_probe("-c", _IMPORT) for _ in range(runs)]
    return [
        Startup(f"import {name}", min(each[name] for each in taken), runs) for name in ("torch", "unsoft")
    ]


def measure_compile(runs: int) -> list[Startup]:
    """What the first native call of a process costs, with nothing compiled yet and with everything
    compiled."""
    with tempfile.TemporaryDirectory(prefix="unsoft-bench-") as directory:
        cold = run_probe("-c", _FIRST_CALL, UNSOFT_CACHE_DIR=directory)["added"]
        warm = [run_probe("-c", _FIRST_CALL, UNSOFT_CACHE_DIR=directory)["added"] for _ in range(runs)]
    return [Startup("cold compile", cold, 1), Startup("warm start", max(min(warm), 0.0), runs)]
