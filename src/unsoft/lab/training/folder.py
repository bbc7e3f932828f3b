"""The folder of a run: whose it is, what it holds, and when it is finished."""

from __future__ import annotations

import errno
import fcntl
import json
import os
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
"""A disk with fewer free bytes is full, also if the last of them were too few for what was written."""


def finished(folder: Path, spec: Mapping[str, Any], who: str) -> dict[str, Any] | None:
    """The result of this very run if the folder has it; ValueError if the folder is another run's or
    something else."""
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
            other = ", ".join(
                f"{name} {theirs.get(name)!r}" for name in spec if theirs.get(name) != spec[name]
            )
            raise ValueError(
                f"{who}: {str(folder)!r} holds another run ({other}); give another folder (--out)"
            )
        there = folder / _RESULT
        return json.loads(there.read_bytes()) if there.exists() else None
    except OSError as problem:
        raise ValueError(f"{who}: {str(folder)!r} cannot be read: {problem.strerror}") from None
    except json.JSONDecodeError as problem:
        raise ValueError(f"{who}: a file of {str(folder)!r} is damaged, it is no JSON: {problem}") from None


@contextmanager
def claimed(
    folder: Path, spec: Mapping[str, Any], who: str, files: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Makes the folder this run's own; meanwhile no other process can train in it.

    ``files`` are put beside its spec. A lock ends with its process, however that ends.
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
    """May a process that was killed before it wrote its spec have left this?"""
    return path.name == _LOCK or (path.name.startswith(".") and path.suffix == UNFINISHED)


def why_not_written(problem: Exception, folder: Path) -> str:
    """What went wrong, in words: torch does not say of a full disk that it is one."""
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
    """The model first and the result last: a folder with a result is complete. Checkpoints have done their
    work then."""
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
            f"the trained model cannot be written to {str(folder)!r}: {reason}; its last checkpoint is kept,"
            " and the same command goes on from there"
        ) from problem
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
