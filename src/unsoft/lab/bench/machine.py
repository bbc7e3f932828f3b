"""The machine and the software versions of a measurement, and whether other programs disturbed it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import unsoft

_PEERS = ("x-transformers", "triton", "flash-attn", "flash-linear-attention")
MISSING = "not installed"
"""The version of a package that is not there."""
_NOISE = 0.25
"""Cores that an idle system uses by itself."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""


def machine() -> str:
    """Return processor, cores and system in one line."""
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def gpu() -> str:
    """Return the current GPU, its memory, and the CUDA or ROCm version of torch."""
    device = torch.cuda.get_device_properties()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"{device.name}, {device.total_memory / 2**30:.0f} GB, {build}"


def load() -> float | None:
    """Return the load average of the last minute, or None if the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def keep_freed_memory() -> None:
    """Let malloc keep the memory of freed tensors, for the rest of this process.

    glibc returns large blocks to the system at once, so every page of the next tensor is cleared first: 40 %
    of the time of a training step of a small language model. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, 2**31 - 1)


def package_versions(*packages: str) -> dict[str, str]:
    """Return the versions of unsoft, torch and the named packages; :data:`MISSING` for those not there.

    >>> list(package_versions("triton"))
    ['unsoft', 'torch', 'triton']
    """
    versions = {"unsoft": unsoft.__version__, "torch": torch.__version__}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = MISSING
    return versions


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, the compiler, and the packages that benchmarks and ``packages`` use."""
    system = {"python": platform.python_version(), "compiler": _compiler()}
    return package_versions() | system | package_versions(*_PEERS, *packages)


class Watch:
    """Detects whether other programs used the cores that a measurement needed.

    The load average cannot tell, since it counts our own work too. So the processor time of the whole machine
    is compared with that of this process, from the creation of the watch on.
    """

    def __init__(self) -> None:
        self._start = (time.perf_counter(), _all_seconds(), _own_seconds())

    def others(self) -> float | None:
        """Return how many cores other programs have used since then; None if unknown."""
        wall, everyone, own = self._start
        now = _all_seconds()
        if everyone is None or now is None:
            return None
        return max(0.0, (now - everyone) - (_own_seconds() - own)) / max(time.perf_counter() - wall, 1e-9)

    def disturbed(self, threads: int) -> bool:
        """Return True if they used cores that ``threads`` threads of ours needed.

        Falls back to the load average if the system does not report processor time.
        """
        others, available = self.others(), len(cores())
        if others is None:
            waiting = load()
            return waiting is not None and waiting > available + 0.5
        return others > available - min(threads, available) + _NOISE


def cores() -> set[int]:
    """Return the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads inside the block; None leaves their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _all_seconds() -> float | None:
    """Return the seconds in which our cores were busy since the system started; None if unknown."""
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
    """Return the processor seconds of this process and of its finished child processes."""
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
