"""What a worker does with one run. It runs in processes of its own, here or in a cluster, and sends plain
data back.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import time
from functools import cache
from pathlib import Path
from typing import Any

from unsoft.files import package_digest
from unsoft.lab.study.record import CUT, DONE, FAILED

_SAVES = 4
"""Checkpoints of a run. Each costs about a tenth of a second, and runs are short."""
_PATIENCE = 60.0
"""Seconds to wait for a process that is about to leave the folder of a run: one that a driver left behind
when it was killed.
"""
_DECIDES = (
    "attention.py",
    "engines",
    "formula",
    "hf",
    "lab/tasks",
    "lab/training",
    "magnitude",
    "mechanisms",
    "modules",
)
_APART = ("lab/training/conversion",)


@cache
def code_digest(plugin: str = "") -> str:
    """Of the code that decides what a run finds, and of the file of a plug-in."""
    ours = package_digest(lambda path: path.startswith(_DECIDES) and not path.startswith(_APART))
    if not plugin:
        return ours[:16]
    found = None if plugin.endswith(".py") else importlib.util.find_spec(plugin)
    file = Path(plugin if found is None else found.origin or plugin)
    theirs = file.read_bytes() if file.is_file() else plugin.encode()
    return hashlib.sha256(ours.encode() + theirs).hexdigest()[:16]


@cache
def _import_once(plugin: str) -> None:
    from unsoft.modules.plugins import import_plugin

    import_plugin(plugin)


def perform(job: dict[str, Any]) -> dict[str, Any]:
    """Trains, or goes on training, and says what came of it: a result, an error, or that it was cut and saved
    itself.
    """
    begin = time.perf_counter()
    try:
        found = _train(job)
    except KeyboardInterrupt:  # Interrupted, which training raises once it has saved itself, is one, too
        found = {"status": CUT}
    except Exception as problem:  # of a task, a mechanism or a library: it is recorded, and others go on
        found = {"status": FAILED, "error": f"{type(problem).__name__}: {problem}"}
    return found | {"wall": time.perf_counter() - begin}


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
