"""Loading and saving without progress bars and reports. Errors are still raised."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as messages


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers inside the ``with`` block."""
    bars, level = messages.is_progress_bar_enabled(), messages.get_verbosity()
    messages.disable_progress_bar()
    messages.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if bars:
            messages.enable_progress_bar()
