"""Ctrl-C and SIGTERM: a signal only sets a flag; the run saves and stops at the end of its step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsoft.training import processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal(TrainerCallback):
    """A callback that stops training at a step's end once a signal came; a second one stops at once."""

    def __init__(self) -> None:
        self.came = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles signals meanwhile, and puts the handlers back; threads other than the first cannot,
        and get none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Asks Trainer to save and to stop."""
        self.came = processes.any_says(self.came)
        if self.came:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
