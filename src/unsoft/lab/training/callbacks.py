"""Callbacks of transformers' Trainer: log, progress, signals, and experiment trackers; and the processes of
``torchrun`` that share a run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import integration_utils

from unsoft.files import write_whole
from unsoft.signals import STOPS, handled

_KEPT = ("step", "loss", "grad_norm", "learning_rate", "eval_score", "eval_loss")


def records(state: TrainerState) -> list[dict[str, Any]]:
    """Return the history of a run without Trainer's bookkeeping."""
    rows = [{name: record[name] for name in _KEPT if name in record} for record in state.log_history]
    return [row for row in rows if len(row) > 1]


class WriteLog(TrainerCallback):
    """Writes the history as JSON lines. The file is rewritten each time, so a resumed run repeats and loses
    no line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write all records so far."""
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in records(state)).encode())


class StepClock(TrainerCallback):
    """Measures steps without the evaluations and checkpoints between them, in this session."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.cpu_seconds = 0, 0.0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clocks."""
        self._begun = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clocks. The first step of a session, which may compile kernels, does not count."""
        if self.steps:
            self.seconds += time.perf_counter() - self._begun[0]
            self.cpu_seconds += time.process_time() - self._begun[1]
        self.steps += 1

    def figures(self) -> dict[str, list[float]]:
        """Return seconds of a step by the wall clock and of the processor; none before the second step."""
        if self.steps < 2:
            return {}
        each = {"seconds_per_step": self.seconds, "cpu_seconds_per_step": self.cpu_seconds}
        return {name: [seconds / (self.steps - 1)] for name, seconds in each.items()}


class ShowProgress(TrainerCallback):
    """Shows a bar in a terminal; elsewhere a line for each evaluation, or for each record of a run without a
    metric."""

    def __init__(self, title: str, metric: str) -> None:
        self.title, self.metric, self.loss, self.score = title, metric, "", ""
        self.console = Console(stderr=True, highlight=False, markup=False)
        self.bar: Progress | None = None

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Start the bar at the first step, or where the run resumes."""
        if sys.stdout.isatty() and self.console.is_terminal:
            columns = (
                # In a narrow window this column wraps, not the numbers behind it.
                TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console)
            self.bar.start()
            self.number = self.bar.add_task(self.title, total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Advance the bar."""
        if self.bar is not None:
            self.bar.update(self.number, completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """Show the latest loss and score."""
        logs = logs or {}
        if "loss" in logs:
            self.loss = f"loss {logs['loss']:.4f}"
        if "eval_score" in logs:
            self.score = f"{self.metric} {logs['eval_score']:.4f}"
        if self.bar is not None:
            self.bar.update(self.number, description=f"{self.title}  {self.loss}  {self.score}")
        elif "eval_score" in logs or ("loss" in logs and not self.metric):
            parts = (f"step {state.global_step} of {state.max_steps}", self.loss, self.score)
            self.print(", ".join(filter(None, parts)))

    def print(self, text: str) -> None:
        """Print a line with the title in front."""
        self.console.print(f"{self.title}: {text}")

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()


def process_count() -> int:
    """Return the number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Return True in the process that prints and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def join_processes() -> None:
    """Join the process group, before files are read or written that all must see alike."""
    if process_count() > 1:
        from accelerate import PartialState  # type: ignore[import-untyped]

        PartialState(cpu=not torch.accelerator.is_available())


def wait_for_processes() -> None:
    """Wait for all processes."""
    if process_count() > 1:
        distributed.barrier()


def any_set(flag: bool) -> bool:
    """Return True in all processes if the flag is set in any, so that all stop at the same step."""
    if process_count() == 1:
        return flag
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    largest = torch.tensor(int(flag), device=device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return bool(largest.item())


class StopOnSignal(TrainerCallback):
    """Stops training at the end of the step after Ctrl-C or SIGTERM; a second signal stops at once."""

    def __init__(self) -> None:
        self.received = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True

    def handling(self) -> AbstractContextManager[None]:
        """Return a context in which signals are handled."""
        return handled(self._handle, *STOPS)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        """Make Trainer save and stop."""
        self.received = any_set(self.received)
        if self.received:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"


def check_trackers(names: Iterable[str]) -> None:
    """Raise ValueError for a tracker that Trainer does not know, or whose package is not installed.

    >>> check_trackers(["tensorbord"])
    Traceback (most recent call last):
    ValueError: train: ...
    """
    known = sorted(integration_utils.INTEGRATION_TO_CALLBACK)
    installed = integration_utils.get_available_reporting_integrations()
    for name in names:
        if name not in known:
            raise ValueError(f"train: Trainer knows no tracker {name!r}; it knows {', '.join(known)}")
        if name not in installed:
            problem = f"the tracker {name!r} needs a package that is not here; pip install {name}"
            raise ValueError(f"train: {problem}")


_TENSORBOARD = "TENSORBOARD_LOGGING_DIR"
"""Trainer reads this; otherwise it writes beside the checkpoints, which are deleted when a run is done."""


@contextmanager
def tracked(names: Iterable[str], folder: Path | None) -> Iterator[None]:
    """Make trackers that write files do so in ``folder``, where they stay.

    >>> with tracked(["tensorboard"], Path("runs/first")):
    ...     os.environ["TENSORBOARD_LOGGING_DIR"]
    'runs/first/tensorboard'
    """
    if "tensorboard" not in names or _TENSORBOARD in os.environ:
        yield
        return
    if folder is None:
        raise ValueError(
            f"train: TensorBoard's files need a folder; give argument 'out', or set {_TENSORBOARD}"
        )
    os.environ[_TENSORBOARD] = str(folder / "tensorboard")
    try:
        yield
    finally:
        del os.environ[_TENSORBOARD]
