"""Peak memory and start-up time, which can only be measured in fresh processes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import unsoft
from unsoft.lab.bench.workload import Call, Workload, baseline, engine

HEADS = 2
_WARM_UP = 256  # tokens of a first call that loads libraries and starts threads
_TIMEOUT_SECONDS = 600
_IMPORT = """
import time
start = time.perf_counter(); import torch
middle = time.perf_counter(); import unsoft; unsoft.attention, unsoft.nn  # names are imported on first use
end = time.perf_counter()
import json; print(json.dumps({"torch": middle - start, "unsoft": end - middle}))
"""
# PyTorch is warmed up first, so that its own first call does not count. _IMPORT times the imports.
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


class ProbeError(RuntimeError):
    """The fresh process failed; the message is the last line of its error output."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of one call on top of the inputs, including the output and gradients."""

    engine: str
    mechanism: str
    mode: str
    length: int
    bytes: int
    ratio: float
    """To the baseline's bytes at the same length."""


@dataclass(frozen=True)
class Startup:
    """One start-up cost in seconds: the smallest of ``runs`` processes."""

    what: str
    seconds: float
    runs: int


def run_probe(*command: str, **environment: str) -> dict[str, Any]:
    """Return the JSON object that ``python <command>`` prints, with this installation on its path."""
    source = str(Path(unsoft.__file__).parents[1])
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    if done.returncode != 0:
        raise ProbeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def measure_memory(mechanism: str, mode: str, length: int, name: str = "native") -> list[Memory]:
    """Return the memory of the baseline and of a mechanism on an engine, at one length."""
    contenders = {"sdpa": "softmax", name: mechanism}
    used = {}
    for who, what in contenders.items():
        task = json.dumps({"who": who, "mechanism": what, "mode": mode, "length": length})
        # A fixed threshold makes malloc return large blocks to the system, so that none hide from the peak.
        used[who] = run_probe("-m", __name__, task, MALLOC_MMAP_THRESHOLD_="65536")["bytes"]
    return [
        Memory(who, what, mode, length, used[who], used[who] / max(used["sdpa"], 1))
        for who, what in contenders.items()
    ]


def _probe(who: str, mechanism: str, mode: str, length: int) -> int:
    """Return the bytes that a call adds to the memory of this process."""
    contender = baseline() if who == "sdpa" else engine(who, mechanism)

    def prepared(length: int) -> Call:
        workload = Workload("memory", length, length, heads=HEADS, mode=mode)
        return partial(contender.compute, workload, workload.inputs())

    prepared(_WARM_UP)()
    return extra_bytes(prepared(length))


def extra_bytes(call: Call) -> int:
    """Return the bytes by which a call raises the peak memory of this process."""
    gc.collect()
    before = reset_peak()
    call()
    return max(peak() - before, 0)


def reset_peak() -> int:
    """Reset the recorded peak where the system supports it; return the bytes in use."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak()


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    try:
        return _status("VmHWM")
    except OSError:
        import resource

        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest * 1024


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def measure_import(runs: int) -> list[Startup]:
    """Return the time of ``import torch`` and of ``import unsoft`` after it."""
    taken = [run_probe("-c", _IMPORT) for _ in range(runs)]
    return [
        Startup(f"import {name}", min(each[name] for each in taken), runs) for name in ("torch", "unsoft")
    ]


def measure_compile(runs: int) -> list[Startup]:
    """Return what the first native call of a process adds, with an empty and with a filled kernel cache."""
    with tempfile.TemporaryDirectory(prefix="unsoft-bench-") as directory:
        cold, *warm = [
            run_probe("-c", _FIRST_CALL, UNSOFT_CACHE_DIR=directory)["added"] for _ in range(1 + runs)
        ]
    return [Startup("cold compile", cold, 1), Startup("warm start", max(min(warm), 0.0), runs)]


if __name__ == "__main__":
    print(json.dumps({"bytes": _probe(**json.loads(sys.argv[1]))}))
