"""What a run shows and writes while it goes on: a bar with loss and score,
and a line of JSON for each record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsoft.files import write_whole

_KEPT = ("step", "loss", "grad_norm", "learning_rate", "eval_score", "eval_loss")


def records(state: TrainerState) -> list[dict[str, Any]]:
    """The history of a run without Trainer's book-keeping."""
    found = [{name: record[name] for name in _KEPT if name in record} for record in state.log_history]
    return [record for record in found if len(record) > 1]


class WriteLog(TrainerCallback):
    """The history as JSON lines.

    The file is written again each time: a resumed run repeats no line and loses none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes what Trainer has recorded so far."""
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in records(state)).encode())


class ShowProgress(TrainerCallback):
    """A bar in a terminal, unless the output goes to a file; else a line for each test, or for each record
    where there is no metric to test."""

    def __init__(self, title: str, metric: str) -> None:
        self.title, self.metric, self.loss, self.score = title, metric, "", ""
        self.console = Console(stderr=True, highlight=False, markup=False)
        self.bar: Progress | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the bar where the run starts."""
        if sys.stdout.isatty() and self.console.is_terminal:
            columns = (
                # In a narrow window this is what breaks, not the numbers behind it.
                TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console)
            self.bar.start()
            self.number = self.bar.add_task(self.title, total=state.max_steps, completed=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Moves the bar."""
        if self.bar is not None:
            self.bar.update(self.number, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Shows the latest loss and score."""
        logs = logs or {}
        if "loss" in logs:
            self.loss = f"loss {logs['loss']:.4f}"
        if "eval_score" in logs:
            self.score = f"{self.metric} {logs['eval_score']:.4f}"
        if self.bar is not None:
            self.bar.update(self.number, description=f"{self.title}  {self.loss}  {self.score}")
        elif "eval_score" in logs or ("loss" in logs and not self.metric):
            words = (f"step {state.global_step} of {state.max_steps}", self.loss, self.score)
            self.say(", ".join(filter(None, words)))

    def say(self, words: str) -> None:
        """A line of its own."""
        self.console.print(f"{self.title}: {words}")

    def close(self) -> None:
        """Takes the bar away, however the run ended."""
        if self.bar is not None:
            self.bar.stop()
