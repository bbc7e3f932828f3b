"""Workers: what one does with a run, and the processes of this machine, with one thread each.

A worker takes a job as plain data and returns the outcome as plain data, here or in a cluster.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import multiprocessing
import os
import signal
import threading
import time
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from unsoft.files import package_digest
from unsoft.lab.study.record import CUT, DONE, FAILED
from unsoft.signals import handled

LOST = "lost"
"""The status of a run whose worker died."""
NODE_LOST = "node lost"
"""The status of a run whose machine was lost, which is not the run's failure."""
_SAVES = 4
"""Checkpoints of a run. Each costs about a tenth of a second, and runs are short."""
_PATIENCE = 60.0
"""Seconds to wait for the process of a killed driver to leave the folder of a run."""
_DECIDES = (
    *("attention.py", "engines", "formula", "hf", "lab/tasks", "lab/training"),
    *("magnitude", "mechanisms", "modules"),
)
_DECIDES_NOT = ("lab/training/conversion",)


@cache
def code_digest(plugin: str = "") -> str:
    """Return a digest of the code that trains, and of the plug-in. It is recorded with each run, and all
    workers of a study must agree on it.
    """
    ours = package_digest(lambda path: path.startswith(_DECIDES) and not path.startswith(_DECIDES_NOT))
    return hashlib.sha256((ours + plugin_digest(plugin)).encode()).hexdigest()[:16] if plugin else ours[:16]


@cache
def plugin_digest(plugin: str) -> str:
    """Return a digest of the file of a plug-in, or "" if there is none."""
    if not plugin:
        return ""
    module = None if plugin.endswith(".py") else importlib.util.find_spec(plugin)
    file = Path(plugin if module is None else module.origin or plugin)
    return hashlib.sha256(file.read_bytes() if file.is_file() else plugin.encode()).hexdigest()


@cache
def _import_once(plugin: str) -> None:
    from unsoft.modules.plugins import import_plugin

    import_plugin(plugin)


def perform(job: dict[str, Any]) -> dict[str, Any]:
    """Train, or resume training, and return the outcome: a result, an error, or that the run was cut and
    saved a checkpoint.
    """
    begin = time.perf_counter()
    try:
        outcome = _train(job)
    except KeyboardInterrupt:  # includes Interrupted, which training raises after it has saved
        outcome = {"status": CUT}
    except Exception as problem:  # of a task, a mechanism or a library: recorded, and other runs continue
        outcome = {"status": FAILED, "error": f"{type(problem).__name__}: {problem}"}
    return outcome | {"wall": time.perf_counter() - begin}


def _train(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from unsoft.lab.bench.machine import machine
    from unsoft.lab.training import Spec, train

    if (mine := code_digest(job["plugin"])) != job["code"]:
        raise ValueError(f"this worker has another version of unsoft (code {mine}, not {job['code']})")
    if job["plugin"]:
        _import_once(job["plugin"])
    torch.set_num_threads(job["threads"])
    folder, spec = Path(job["folder"]), Spec.from_dict(job["spec"])
    assert spec.steps is not None
    _wait_until_free(folder)
    result = train(spec, folder, save_every=max(1, spec.steps // _SAVES))
    return {"status": DONE, "result": result.to_dict(), "machine": machine()}


def _wait_until_free(folder: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            with (folder / ".lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.2)


class LocalWorkers:
    """Processes of this machine, which import torch once and then take one run after another. A dead one is
    replaced, and its run comes back as lost.
    """

    def __init__(self, count: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers = [_Process(self._context) for _ in range(count)]
        self.slots = count
        self._stopped = False

    def free(self) -> int:
        """Return how many workers could take a run now."""
        return sum(worker.key is None for worker in self._workers)

    def submit(self, key: str, job: dict[str, Any]) -> None:
        """Give a run to a worker that has none."""
        worker = next(worker for worker in self._workers if worker.key is None)
        worker.key = key
        with contextlib.suppress(OSError):  # the process is dead: wait reports it
            worker.pipe.send({**job, "threads": 1})

    def wait(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Return runs that ended with their outcomes, as soon as there is one."""
        busy = [worker.pipe for worker in self._workers if worker.key is not None]
        ready = wait(busy, seconds)
        ended = []
        for index, worker in enumerate(self._workers):
            if worker.key is None or worker.pipe not in ready:
                continue
            key, outcome = worker.key, worker.outcome()
            if outcome["status"] == LOST and not self._stopped:
                self._workers[index] = _Process(self._context)
            ended.append((key, outcome))
        return ended

    def stop(self) -> None:
        """Ask all runs to save a checkpoint and end."""
        self._stopped = True
        for worker in self._workers:
            if worker.key is not None:
                worker.process.terminate()

    def close(self, *, at_once: bool = False) -> None:
        """End all processes; with ``at_once`` without waiting for their runs."""
        for worker in self._workers:
            worker.pipe.close()
            if at_once:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join()


class _Process:
    """A worker process, the pipe to it, and the ``key`` of its run."""

    def __init__(self, context: Any) -> None:
        self.key: str | None = None
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        # A terminal sends Ctrl-C to all processes. Workers inherit that it is ignored; the driver stops them.
        with handled(signal.SIG_IGN, signal.SIGINT):
            self.process.start()
        theirs.close()

    def outcome(self) -> dict[str, Any]:
        """Return the outcome that the worker sent, or that the worker is lost."""
        self.key = None
        try:
            sent: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            error = f"its worker died (exit code {self.process.exitcode})"
            return {"status": LOST, "error": error, "wall": 0.0}
        return sent


def _serve(pipe: Connection) -> None:
    """Run jobs until the pipe closes. SIGTERM cuts the current run; the process ends with the driver's."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    from unsoft.lab.bench.machine import keep_freed_memory

    keep_freed_memory()
    with contextlib.suppress(EOFError, KeyboardInterrupt, OSError):
        while True:
            pipe.send(perform(pipe.recv()))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
