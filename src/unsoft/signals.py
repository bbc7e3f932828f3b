"""Temporary handlers of signals such as Ctrl-C and SIGTERM."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals with which a terminal and a scheduler stop a run."""


@contextmanager
def handled(
    handle: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: int
) -> Iterator[None]:
    """Handle signals with ``handle`` inside the block, and restore the previous handlers after it.

    Only the main thread can handle signals; in other threads this does nothing.

    >>> received = []
    >>> with handled(lambda number, frame: received.append(number), signal.SIGTERM):
    ...     signal.raise_signal(signal.SIGTERM)
    >>> received == [signal.SIGTERM]
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
