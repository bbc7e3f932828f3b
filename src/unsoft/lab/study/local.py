"""Workers on this machine: processes with one thread each, that import torch once and then take one run after
another.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from unsoft.signals import handled

LOST = "lost"
"""The status of a run whose worker died."""
NODE_LOST = "node lost"
"""The status of a run whose machine was lost, which is not the run's failure."""


class LocalWorkers:
    """So many processes. A dead one is replaced, and its run comes back as lost."""

    def __init__(self, count: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers = [_Worker(self._context) for _ in range(count)]
        self.slots = count
        self._stopped = False

    def free(self) -> int:
        """How many could take a run now."""
        return sum(worker.key is None for worker in self._workers)

    def submit(self, key: str, job: dict[str, Any]) -> None:
        """Gives a run to a worker that has none."""
        worker = next(worker for worker in self._workers if worker.key is None)
        worker.key = key
        with contextlib.suppress(OSError):  # dead already: wait says so
            worker.pipe.send({**job, "threads": 1})

    def wait(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Runs that ended since, with what came of them; returns at once when there is one."""
        busy = [worker.pipe for worker in self._workers if worker.key is not None]
        ready = wait(busy, seconds)
        ended = []
        for index, worker in enumerate(self._workers):
            if worker.key is None or worker.pipe not in ready:
                continue
            key, outcome = worker.key, worker.outcome()
            if outcome["status"] == LOST and not self._stopped:
                self._workers[index] = _Worker(self._context)
            ended.append((key, outcome))
        return ended

    def stop(self) -> None:
        """Asks all runs to save themselves and to end."""
        self._stopped = True
        for worker in self._workers:
            if worker.key is not None:
                worker.process.terminate()

    def close(self, *, at_once: bool = False) -> None:
        """Ends all processes; ``at_once`` without waiting for what they do."""
        for worker in self._workers:
            worker.pipe.close()
            if at_once:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join()


class _Worker:
    """A process and the pipe to it; ``key`` is of the run that it has."""

    def __init__(self, context: Any) -> None:
        self.key: str | None = None
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        # A process that starts meanwhile does not hear Ctrl-C, which a terminal sends to all: the driver
        # tells it to stop.
        with handled(signal.SIG_IGN, signal.SIGINT):
            self.process.start()
        theirs.close()

    def outcome(self) -> dict[str, Any]:
        """What the worker sent, or that it is lost."""
        self.key = None
        try:
            found: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return {
                "status": LOST,
                "error": f"its worker died (exit code {self.process.exitcode})",
                "wall": 0.0,
            }
        return found


def _serve(pipe: Connection) -> None:
    """The life of a worker. Ctrl-C is the driver's; SIGTERM cuts the run that is under way, and a death of
    the driver ends all.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    from unsoft.lab.study.worker import perform

    with contextlib.suppress(EOFError, KeyboardInterrupt, OSError):
        while True:
            pipe.send(perform(pipe.recv()))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
