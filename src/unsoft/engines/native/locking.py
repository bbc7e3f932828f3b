"""Locks for libraries: one process compiles a library while others wait for it.

A lock is ``flock`` on the file ``<library>.lock`` in the cache folder. The system releases it when its holder
ends, also after ``kill -9``. The holder deletes the file, so lock files do not accumulate.

No result depends on a lock, because finished libraries are renamed into place. Where there are none (some
network filesystems, Windows) or the holder takes too long, a library is compiled without a lock, at worst
twice.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".tmp"
_LOCK = ".lock"
_LONGEST_WAIT = 120.0
_SECONDS_BETWEEN_TRIES = 0.05
_STALE_AFTER = 3600.0
"""Seconds until an unfinished file without a lock counts as abandoned; compilers are stopped earlier."""
_held: set[int] = set()


@contextmanager
def library_lock(folder: Path, stem: str, cancelled: threading.Event) -> Iterator[bool]:
    """Hold the lock of a library; yield False if there are no locks here or its holder does not finish.

    Raise InterruptedError once ``cancelled`` is set: signals do not reach threads that wait.
    """
    path = folder / f"{stem}{_LOCK}"
    descriptor = _wait_for(path, cancelled)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            _release(descriptor, path)


def remove_unfinished(folder: Path, *, stale_after: float = _STALE_AFTER) -> None:
    """Delete what killed processes left in the folder: lock files and unfinished libraries.

    Files of a process that holds a lock stay. Those that were written without a lock are deleted
    ``stale_after`` seconds after their last change.
    """
    for path in folder.glob(f"*{_LOCK}"):
        with suppress(OSError):  # another process holds the lock, or there are no locks here
            descriptor = _take(path)
            try:
                for file in folder.glob(f"{path.stem}.*{UNFINISHED}"):
                    file.unlink(missing_ok=True)
            finally:
                _release(descriptor, path)
    for file in folder.glob(f"*{UNFINISHED}"):
        is_locked = (folder / f"{file.name.partition('.')[0]}{_LOCK}").exists()
        with suppress(OSError):  # deleted by another process
            if not is_locked and time.time() - file.stat().st_mtime >= stale_after:
                file.unlink()


def _wait_for(path: Path, cancelled: threading.Event) -> int | None:
    # flock could wait by itself, but nothing would interrupt it in a thread, nor end it after a while.
    deadline = time.monotonic() + _LONGEST_WAIT
    while time.monotonic() < deadline:
        try:
            return _take(path)
        except BlockingIOError:
            if cancelled.wait(_SECONDS_BETWEEN_TRIES):
                raise InterruptedError(f"interrupted while waiting for {path}") from None
        except OSError:
            return None
    return None


def _take(path: Path) -> int:
    """Return the descriptor of the lock file, locked.

    Raise BlockingIOError if it is held, another OSError if this filesystem has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(descriptor)
        if not _is_same_file(descriptor, path):  # its last holder deleted it after it was opened here
            raise BlockingIOError
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    _held.add(descriptor)
    return descriptor


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise OSError("no file locks") from error
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _release(descriptor: int, path: Path) -> None:
    import fcntl

    # Deleted before it is released: whoever opens the file later makes a new one.
    if _is_same_file(descriptor, path):
        path.unlink(missing_ok=True)
    _held.discard(descriptor)
    # Explicitly: a child that was forked a moment ago may have the file open, too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _after_fork() -> None:
    """Let go of the parent's locks: the child would keep them if the parent were killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
