"""Ctrl-C and SIGTERM: a signal only sets a flag; the run saves and stops at the end of its step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsoft.lab.training import processes
from unsoft.signals import STOPS, handled


class StopOnSignal(TrainerCallback):
    """A callback that stops training at a step's end once a signal came; a second one stops at once."""

    def __init__(self) -> None:
        self.came = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    def listening(self) -> AbstractContextManager[None]:
        """Within it, signals are handled."""
        return handled(self._handle, *STOPS)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Asks Trainer to save and to stop."""
        self.came = processes.any_says(self.came)
        if self.came:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
