"""Signals, such as Ctrl-C and SIGTERM, handled for a while."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)
"""What a terminal and a scheduler send to a run that should stop."""


@contextmanager
def handled(
    handle: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: int
) -> Iterator[None]:
    """Meanwhile ``handle`` gets these signals; then the handlers before it get them again.

    Threads other than the first cannot handle signals; in them nothing changes.

    >>> came = []
    >>> with handled(lambda number, frame: came.append(number), signal.SIGTERM):
    ...     signal.raise_signal(signal.SIGTERM)
    >>> came == [signal.SIGTERM]
    True
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
