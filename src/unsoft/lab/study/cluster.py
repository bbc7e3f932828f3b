"""Workers of a Ray cluster. Ray finds machines and starts processes; runs, checkpoints and the store are the
same as on one machine.
"""

from __future__ import annotations

import os
from typing import Any

from unsoft.lab.study.local import LOST
from unsoft.lab.study.record import CUT
from unsoft.lab.study.worker import perform

HERE = "local"
"""Instead of an address: a cluster of this machine alone, which ends with the command."""


class RayWorkers:
    """As many runs at a time as the cluster has room for. What dies comes back as lost, and is given again by
    the driver.
    """

    def __init__(self, address: str, cpus: float, gpus: float) -> None:
        # Ray would otherwise report its use to its makers.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise ValueError(
                "study: a cluster needs ray; install it with pip install 'unsoft[cluster]'"
            ) from None
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if address == HERE:
                ray.init(include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as problem:
            reason = str(problem).strip().splitlines()[0]
            raise ValueError(
                f"study: there is no Ray cluster at {address!r} ({reason}); ray start --head makes one,"
                " --ray local needs none"
            ) from None
        self._ray: Any = ray
        self._cpus, self._gpus = cpus, gpus
        # Ray's own retries would hide deaths from the record.
        self._perform = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(perform)
        self._running: dict[Any, str] = {}

    @property
    def slots(self) -> int:
        """By what the cluster has now: it may grow."""
        there = self._ray.cluster_resources()
        room = [there.get("CPU", 0) / self._cpus]
        if self._gpus:
            room.append(there.get("GPU", 0) / self._gpus)
        return max(1, int(min(room)))

    def free(self) -> int:
        """How many more runs there is room for."""
        return self.slots - len(self._running)

    def submit(self, key: str, job: dict[str, Any]) -> None:
        """Gives a run to the cluster."""
        threads = max(1, int(self._cpus))
        reference = self._perform.remote({**job, "threads": threads})
        self._running[reference] = key

    def wait(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Runs that ended since, with what came of them."""
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        return [(self._running.pop(reference), self._outcome(reference)) for reference in ready]

    def _outcome(self, reference: Any) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._ray.get(reference)
        except self._ray.exceptions.TaskCancelledError:
            return {"status": CUT, "wall": 0.0}
        except self._ray.exceptions.RayError as problem:
            reason = str(problem).strip().splitlines()[0]
            return {"status": LOST, "error": f"its worker died ({reason})", "wall": 0.0}
        return found

    def stop(self) -> None:
        """Asks all runs to save themselves and to end; Ray hands the request on as Ctrl-C."""
        for reference in self._running:
            self._ray.cancel(reference, force=False)

    def close(self, *, at_once: bool = False) -> None:
        """Leaves the cluster."""
        if at_once:
            for reference in self._running:
                self._ray.cancel(reference, force=True)
        self._ray.shutdown()
