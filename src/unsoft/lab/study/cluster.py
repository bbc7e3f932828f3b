"""Workers of a Ray cluster. Ray provides machines and processes; runs, checkpoints and the store work as on
one machine.
"""

from __future__ import annotations

import os
import time
from typing import Any

from unsoft.lab.study.record import CUT
from unsoft.lab.study.worker import LOST, NODE_LOST, perform

HERE = "local"
"""Used instead of an address: a cluster of this machine alone, which ends with the command."""
_PATIENCE = 300.0
"""Seconds to wait for a node with room for a run; a cluster that grows on demand needs some time."""
_NOTICE = 60.0
"""Seconds until a cluster has noticed that a node is dead; with Ray's defaults it takes about 15."""


class RayWorkers:
    """As many runs at a time as the cluster has room for. A run whose worker or node dies is reported as
    such, and the driver submits it again.
    """

    def __init__(self, address: str, cpus: float, gpus: float) -> None:
        # Ray sends usage statistics otherwise.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            problem = "a cluster needs ray; install it with pip install 'unsoft[cluster]'"
            raise ValueError(f"study: {problem}") from None
        self._ray: Any = ray
        self._address, self._cpus, self._gpus = address, cpus, gpus
        self._running: dict[Any, str] = {}
        try:
            self._connect()
        except ConnectionError as problem:
            raise ValueError(
                f"study: there is no Ray cluster at {address!r} ({problem}); ray start --head makes one,"
                " --ray local needs none"
            ) from None

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        is_here = self._address == HERE
        where: dict[str, Any] = {"include_dashboard": False} if is_here else {"address": self._address}
        try:
            self._ray.init(**where, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as problem:
            raise ConnectionError(_first_line(problem)) from None
        self._cut_off = False
        """True when the node of this machine, through which runs are submitted, is dead."""
        self._roomy = time.monotonic()
        """When the cluster last had room for a run."""
        # Ray's own retries would hide deaths from the record.
        self._perform = self._ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_retries=0)(perform)

    @property
    def slots(self) -> int:
        """Room that the cluster has now; it may grow."""
        return max(1, self._room())

    def _room(self) -> int:
        resources = self._ray.cluster_resources()
        room = [resources.get("CPU", 0) / self._cpus]
        if self._gpus:
            room.append(resources.get("GPU", 0) / self._gpus)
        return int(min(room))

    def free(self) -> int:
        """Return how many more runs there is room for."""
        if self._cut_off:
            if self._running:  # on other nodes: they still report to this connection
                return 0
            self._reconnect()
        if self._gave_up():
            raise ConnectionError(
                f"study: no node of the Ray cluster had room for a run for {_PATIENCE / 60:.0f} minutes;"
                " start one, and run the same command again to resume"
            )
        return self.slots - len(self._running)

    def _reconnect(self) -> None:
        """Connect through another node of this machine, or restart the local cluster."""
        mine, end = self._ray.get_runtime_context().get_node_id(), time.monotonic() + _NOTICE
        # Before it has noticed, the cluster would offer the dead node.
        while any(node["NodeID"] == mine and node["Alive"] for node in self._ray.nodes()):
            if time.monotonic() > end:
                break
            time.sleep(0.5)
        self._ray.shutdown()
        try:
            self._connect()
        except ConnectionError as problem:
            raise ConnectionError(
                f"study: the Ray node of this machine was lost ({problem}); start it, and run the same"
                " command again to resume"
            ) from None

    def _gave_up(self) -> bool:
        if self._room():
            self._roomy = time.monotonic()
        return time.monotonic() - self._roomy > _PATIENCE

    def submit(self, key: str, job: dict[str, Any]) -> None:
        """Submit a run to the cluster."""
        threads = max(1, int(self._cpus))
        reference = self._perform.remote({**job, "threads": threads})
        self._running[reference] = key

    def wait(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Return runs that ended with their outcomes."""
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        if not ready and self._gave_up():
            for reference in self._running:
                self._ray.cancel(reference, force=True)
            keys = list(self._running.values())
            self._running.clear()
            return [(key, {"status": CUT, "wall": 0.0}) for key in keys]
        return [(self._running.pop(reference), self._outcome(reference)) for reference in ready]

    def _outcome(self, reference: Any) -> dict[str, Any]:
        errors = self._ray.exceptions
        try:
            outcome: dict[str, Any] = self._ray.get(reference)
        except errors.TaskCancelledError:
            return {"status": CUT, "wall": 0.0}
        except (errors.NodeDiedError, errors.LocalRayletDiedError, errors.ObjectLostError) as problem:
            self._cut_off |= isinstance(problem, errors.LocalRayletDiedError)
            return {"status": NODE_LOST, "error": f"its node was lost ({_first_line(problem)})", "wall": 0.0}
        except errors.RayError as problem:
            return {"status": LOST, "error": f"its worker died ({_first_line(problem)})", "wall": 0.0}
        return outcome

    def stop(self) -> None:
        """Ask all runs to save a checkpoint and end; Ray delivers the request as Ctrl-C."""
        for reference in self._running:
            self._ray.cancel(reference, force=False)

    def close(self, *, at_once: bool = False) -> None:
        """Disconnect from the cluster."""
        if at_once:
            for reference in self._running:
                self._ray.cancel(reference, force=True)
        self._ray.shutdown()


def _first_line(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0]
