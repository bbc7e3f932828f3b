"""The folder of a run and its checkpoints.

Trainer writes a checkpoint file by file, so each gets a seal with digests when it is complete. A checkpoint
without a seal, or with a file that differs from its digest, is never loaded.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unsoft.files import UNFINISHED, write_whole

_SPEC, _RESULT, _MODEL, _LOCK = "spec.json", "result.json", "model", ".lock"
LOG, CHECKPOINTS = "log.jsonl", "checkpoints"
_FULL = 1 << 14
"""A disk with fewer free bytes counts as full: the rest may be too small for the file."""


def finished(folder: Path, spec: Mapping[str, Any], who: str) -> dict[str, Any] | None:
    """Return the result if the folder holds this run finished; ValueError if it holds something else."""
    written = folder / _SPEC
    try:
        if not written.exists():
            if folder.exists() and any(not _left_behind(path) for path in folder.iterdir()):
                raise ValueError(
                    f"{who}: {str(folder)!r} is not empty and holds no run; give another folder (--out)"
                )
            return None
        theirs = json.loads(written.read_bytes())
        if theirs != spec:
            differs = [name for name in spec if theirs.get(name) != spec[name]]
            other = f"another run ({', '.join(f'{name} {theirs.get(name)!r}' for name in differs)})"
            raise ValueError(f"{who}: {str(folder)!r} holds {other}; give another folder (--out)")
        result = folder / _RESULT
        return json.loads(result.read_bytes()) if result.exists() else None
    except OSError as problem:
        raise ValueError(f"{who}: {str(folder)!r} cannot be read: {problem.strerror}") from None
    except json.JSONDecodeError as problem:
        raise ValueError(f"{who}: a file of {str(folder)!r} is damaged, it is no JSON: {problem}") from None


@contextmanager
def claimed(
    folder: Path, spec: Mapping[str, Any], who: str, files: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Reserve the folder for this run, so that no other process can train in it.

    ``files`` are written beside its spec. The lock ends with the process, however that ends.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("w")
    except OSError as problem:
        raise ValueError(f"{who}: {str(folder)!r} cannot be written: {problem.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{who}: another process works in {str(folder)!r}") from None
        for path in folder.glob(f".*{UNFINISHED}"):  # of a process that was killed while it wrote
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not (folder / _SPEC).exists():
            write_whole(folder / _SPEC, json.dumps(spec, indent=1).encode())
        for name, content in (files or {}).items():
            write_whole(folder / name, content.encode())
        yield
    (folder / _LOCK).unlink(missing_ok=True)


def _left_behind(path: Path) -> bool:
    """Return True for files that a process leaves if it is killed before it writes its spec."""
    return path.name == _LOCK or (path.name.startswith(".") and path.suffix == UNFINISHED)


def why_not_written(problem: Exception, folder: Path) -> str:
    """Explain an error of writing. torch reports a full disk as a write position error."""
    if shutil.disk_usage(folder).free < _FULL:
        return os.strerror(errno.ENOSPC)
    return getattr(problem, "strerror", None) or str(problem)


def finish(
    folder: Path,
    model: PreTrainedModel,
    result: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model first and the result last, so that a folder with a result is complete; remove
    checkpoints.
    """
    unfinished = folder / f".{_MODEL}{UNFINISHED}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        model.save_pretrained(unfinished, state_dict=None if weights is None else dict(weights))
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder / _MODEL, ignore_errors=True)
        os.replace(unfinished, folder / _MODEL)
        write_whole(folder / _RESULT, json.dumps(result, indent=1).encode())
    except Exception as problem:  # of many libraries: safetensors, the operating system
        reason = why_not_written(problem, folder)
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(
            f"the trained model cannot be written to {str(folder)!r}: {reason}; its last checkpoint is kept;"
            " rerun the same command to resume"
        ) from problem
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


SEAL = "complete.json"


def seal(folder: Path) -> None:
    """Write the seal: digests of all files in the folder."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != SEAL:
            with path.open("rb") as file:
                digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
    write_whole(folder / SEAL, json.dumps(digests, indent=1).encode())


def is_complete(folder: Path) -> bool:
    """Return True if the folder is sealed and no file has changed since."""
    try:
        digests = json.loads((folder / SEAL).read_bytes())
        for name, digest in digests.items():
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return False
    except (OSError, ValueError, AttributeError):
        return False
    return True


def sweep(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint; remove damaged or unfinished ones and return their names."""
    newest, removed = None, []
    for path in sorted(folder.glob("checkpoint-*"), key=_step, reverse=True):
        if is_complete(path):
            newest = newest or path
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return newest, removed


def _step(path: Path) -> int:
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match else -1
