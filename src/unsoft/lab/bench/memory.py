"""How much memory does a call need beyond its inputs? Each answer comes from a process of its own."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unsoft.lab.bench.contender import Contender, baseline, engine
from unsoft.lab.bench.probe import run_probe
from unsoft.lab.bench.workload import Workload

HEADS = 2
_WARM_UP = 256  # tokens of a first call that loads libraries and starts threads


@dataclass(frozen=True)
class Memory:
    """Peak memory of one call on top of the inputs, the output and gradients included."""

    engine: str
    mechanism: str
    mode: str
    length: int
    bytes: int
    ratio: float
    """To the baseline's bytes at the same length."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_memory(mechanism: str, mode: str, length: int, name: str = "native") -> list[Memory]:
    """The baseline and a mechanism on an engine at one length."""
    needed = {who: _extra_bytes(who, mechanism, mode, length) for who in ("sdpa", name)}
    return [
        Memory(
            who, "softmax" if who == "sdpa" else mechanism, mode, length, used, used / max(needed["sdpa"], 1)
        )
        for who, used in needed.items()
    ]


def _extra_bytes(who: str, mechanism: str, mode: str, length: int) -> int:
    task = json.dumps({"who": who, "mechanism": mechanism, "mode": mode, "length": length})
    # A fixed threshold makes malloc give large blocks back to the system, so that none hide from the peak.
    found: int = run_probe("-m", __name__, task, MALLOC_MMAP_THRESHOLD_="65536")["bytes"]
    return found


def _probe(who: str, mechanism: str, mode: str, length: int) -> int:
    contender = baseline() if who == "sdpa" else engine(who, mechanism)
    _compute(contender, mode, _WARM_UP)
    workload = Workload("memory", length, length, heads=HEADS, mode=mode)
    inputs = workload.inputs()
    gc.collect()
    before = reset_peak()
    contender.compute(workload, inputs)
    return max(peak() - before, 0)


def _compute(contender: Contender, mode: str, length: int) -> None:
    workload = Workload("memory", length, length, heads=HEADS, mode=mode)
    contender.compute(workload, workload.inputs())


def reset_peak() -> int:
    """Forgets the peak so far where the system can do that; returns the bytes in use."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak()


def peak() -> int:
    try:
        return _status("VmHWM")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    print(json.dumps({"bytes": _probe(**json.loads(sys.argv[1]))}))
