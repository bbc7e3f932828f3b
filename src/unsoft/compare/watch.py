"""Was the machine ours alone while time was taken?"""

from __future__ import annotations

import os
import time
from pathlib import Path

from unsoft.bench.record import load

_NOISE = 0.25
"""Cores that an idle system uses by itself."""


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
