"""What is kept of a run: results, bars, and the machine, versions and seed they belong to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import unsoft
from unsoft.bench.bars import bars
from unsoft.bench.memory import Memory
from unsoft.bench.plan import Result
from unsoft.bench.startup import Startup
from unsoft.bench.timing import Timing
from unsoft.bench.workload import SEED
from unsoft.files import write_json

_PEERS = ("x-transformers", "triton", "flash-attn", "flash-linear-attention")


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


def machine() -> str:
    """One line: processor, cores, system."""
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def gpu() -> str:
    """The current GPU, its memory and the driver's side of torch."""
    about = torch.cuda.get_device_properties()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"{about.name}, {about.total_memory / 2**30:.0f} GB, {build}"


def load() -> float | None:
    """How many processes wanted a core during the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str]:
    """Python, the compiler and the packages that took part; "not installed" is an answer too."""
    found = {"unsoft": unsoft.__version__, "torch": torch.__version__, "python": platform.python_version()}
    found["compiler"] = _compiler()
    for package in _PEERS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _compiler() -> str:
    from unsoft.engines.native.compiler import CompilationError, find_compiler

    try:
        done = subprocess.run([find_compiler(), "--version"], capture_output=True, text=True, timeout=20)
    except (CompilationError, OSError, subprocess.TimeoutExpired):
        return "none"
    return (done.stdout.splitlines() or ["unknown"])[0]
