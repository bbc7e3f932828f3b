"""Work in several processes at once. They are copies of this one: nothing is imported or registered again."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

T = TypeVar("T")
_work: Sequence[Callable[[], Any]] = ()
"""What the copies inherit; a function need not be one that can be sent to another process."""


def can_copy_itself() -> bool:
    """Does the system copy processes safely, and is no other thread at work whose locks a copy would keep?"""
    return sys.platform == "linux" and threading.active_count() == 1


def in_processes(work: Sequence[Callable[[], T]], count: int) -> Iterator[tuple[int, T]]:
    """Calls the functions, in this order, in ``count`` copies of this process; yields the place of each and
    its result as they come.

    If a copy dies, nothing more comes: what is missing is left to the caller.

    >>> sorted(in_processes([lambda: "a", lambda: "b"], 2)) if can_copy_itself() else [(0, "a"), (1, "b")]
    [(0, 'a'), (1, 'b')]
    """
    global _work
    _work = work
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), initializer=_end_at_once)
    try:
        places = {pool.submit(_do, place): place for place in range(len(work))}
        for done in as_completed(places):
            yield places[done], done.result()
    except BrokenProcessPool:
        return
    finally:
        pool.shutdown(cancel_futures=True)
        _work = ()


def _end_at_once() -> None:
    """Ctrl-C reaches all processes of a terminal; only the first one has something to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _do(place: int) -> Any:
    return _work[place]()
