"""The machine that a time was taken on: what it is, and whether other programs used it meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

import unsoft

_PEERS = ("x-transformers", "triton", "flash-attn", "flash-linear-attention")
_NOISE = 0.25
"""Cores that an idle system uses by itself."""


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


class Watch:
    """Did other programs disturb what is timed? The load average
    cannot tell, since it counts our own work too.

    So the processor time of the whole machine is compared with that of this process, from when the watch is
    made.
    """

    def __init__(self) -> None:
        self._start = (time.perf_counter(), _all_seconds(), _own_seconds())

    def others(self) -> float | None:
        """How many cores other programs have used since then; None where the system does not tell."""
        wall, everyone, own = self._start
        now = _all_seconds()
        if everyone is None or now is None:
            return None
        return max(0.0, (now - everyone) - (_own_seconds() - own)) / max(time.perf_counter() - wall, 1e-9)

    def disturbed(self, threads: int) -> bool:
        """Did they take cores that ``threads`` threads of ours needed?

        Without an answer, the load average decides.
        """
        others, many = self.others(), len(cores())
        if others is None:
            waiting = load()
            return waiting is not None and waiting > many + 0.5
        return others > many - min(threads, many) + _NOISE


def cores() -> set[int]:
    """Those that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _all_seconds() -> float | None:
    """Seconds in which our cores were not idle, since the system started."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    names, total = {f"cpu{core}" for core in cores()}, 0
    for line in lines:
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _idle, _waiting, *more = map(int, ticks[:8])
            total += user + nice + system + sum(more)
    return total / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Of this process and of those that it started and waited for."""
    return sum(os.times()[:4])


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
