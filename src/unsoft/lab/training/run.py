"""``train``: one run, from its spec to its result; interrupted runs resume."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import TrainerCallback

from unsoft.errors import Interrupted
from unsoft.hf.quiet import quiet
from unsoft.lab.tasks import IGNORE, Task
from unsoft.lab.training import processes
from unsoft.lab.training.callbacks import ShowProgress, StopOnSignal, WriteLog, check_trackers, tracked
from unsoft.lab.training.final_test import Result, final_result
from unsoft.lab.training.folder import CHECKPOINTS, LOG, claimed, finish, finished, sweep
from unsoft.lab.training.model import build
from unsoft.lab.training.repulsion import Repulsion
from unsoft.lab.training.spec import Spec, check_whole
from unsoft.lab.training.trainer import TaskTrainer
from unsoft.modules.registry import label_of


def train(
    spec: Spec,
    out: str | Path | None = None,
    *,
    save_every: int | None = None,
    eval_every: int | None = None,
    report_to: list[str] | None = None,
    fsdp: bool = False,
    progress: bool = False,
) -> Result:
    """Train and test the run of a spec.

    out
        A folder for the run: ``spec.json``, ``log.jsonl``, checkpoints while it runs, and finally ``model``
        (which :func:`unsoft.hf.load` reads) and ``result.json``. If it holds the same run unfinished, the run
        resumes, with the same weights bit for bit as without the interruption; if it is finished, its result
        is returned. Without a folder nothing is kept.
    save_every, eval_every
        Steps between checkpoints and between evaluations; a tenth of the run by default.
    report_to
        Trackers that transformers' Trainer knows, such as ["tensorboard"].
    fsdp
        Under torchrun: every process keeps a part of weights and optimizer (FSDP2) instead of a copy (DDP).

    Under torchrun the processes share every batch, and the first of them writes and prints.

    Ctrl-C and SIGTERM save a checkpoint and raise :class:`unsoft.errors.Interrupted`; a loss that is not
    finite raises :class:`unsoft.errors.DivergenceError`.

    >>> import unsoft
    >>> task = {"task": "copy", "knobs": {"length": 2}}
    >>> spec = unsoft.lab.training.Spec(**task, mechanism="cog", width=16, steps=2, batch=2)
    >>> result = unsoft.lab.training.train(spec)
    >>> result.steps, result.chance, result.known
    (2, 0.0625, 1.0)
    """
    full, task = spec.filled(), spec.make_task()
    assert full.steps
    check_whole("train", "save_every", save_every)
    check_whole("train", "eval_every", eval_every)
    if out is not None and (content := finished(Path(out), full.to_dict(), "train")) is not None:
        return Result.from_dict(content)
    _check_processes(full, fsdp)
    _check_examples(task)
    check_trackers(report_to or [])
    first, damaged, tenth = processes.is_first(), [], max(1, full.steps // 10)
    with ExitStack() as closing:
        closing.enter_context(tracked(report_to or [], None if out is None else Path(out)))
        closing.enter_context(quiet())
        model = build(full, task)  # before the folder: a spec that cannot be built leaves none behind
        processes.join()
        if out is None:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = Path(out)
            if first:
                closing.enter_context(claimed(folder, full.to_dict(), "train", task.files()))
                damaged = sweep(folder / CHECKPOINTS)[1]
            processes.wait()
        stop = StopOnSignal()
        closing.enter_context(stop.handling())
        callbacks: list[TrainerCallback] = [stop]
        if first:
            callbacks.append(WriteLog(folder / LOG))
        if full.repulse:
            callbacks.append(Repulsion(alpha=full.alpha, kind=full.repulse))
        newest, _ = sweep(folder / CHECKPOINTS)
        if progress and first:
            shown = ShowProgress(f"{full.task} {label_of(full.mechanism)}", task.metric)
            closing.callback(shown.close)
            callbacks.append(shown)
            for name in damaged:
                shown.print(f"{name} is not complete and was removed")
        trainer = TaskTrainer(
            model,
            full,
            task,
            folder=folder / CHECKPOINTS,
            save_every=None if out is None else save_every or tenth,
            eval_every=eval_every or tenth,
            report_to=report_to or [],
            fsdp=fsdp,
            callbacks=callbacks,
        )
        begin = time.perf_counter()
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        seconds = time.perf_counter() - begin
        if stop.received and trainer.state.global_step < full.steps:
            raise Interrupted(_interrupted(trainer.state.global_step, full.steps, out))
        result = final_result(trainer, seconds)
        if out is not None:
            weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if fsdp else None
            if first:
                finish(folder, model, result.to_dict(), weights=weights)
            processes.wait()
        return result


def _check_examples(task: Task) -> None:
    """Raise ValueError if an example of a task, perhaps a user's own, cannot be learned."""
    inputs, labels = task.sample(1, training=True)
    asked = labels[labels != IGNORE]
    if not len(asked):
        raise ValueError(f"{task.name}: an example asks nothing: all of its labels are {IGNORE}")
    for what, values, count, field in (
        ("token", inputs, task.size, "size"),
        ("label", asked, task.outputs, "outputs"),
    ):
        if values.is_floating_point():  # features, images, and labels that are vectors
            continue
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= count:
            wrong = low if low < 0 else high
            raise ValueError(f"{task.name}: the {what} {wrong} is none of the {count} of its {field!r}")


def _check_processes(spec: Spec, fsdp: bool) -> None:
    """Raise ValueError if the batch or the model cannot be shared by the processes."""
    assert spec.batch
    if spec.batch < processes.count():
        raise ValueError(f"train: a batch of {spec.batch} cannot be shared by {processes.count()} processes")
    if fsdp and processes.count() == 1:
        raise ValueError("train: 'fsdp' shares a model among processes; start them with torchrun")
    if fsdp and not torch.accelerator.is_available():
        raise ValueError(
            "train: 'fsdp' needs GPUs, since accelerate silently falls back to DDP on CPUs; leave it out"
        )


def _interrupted(step: int, steps: int, out: str | Path | None) -> str:
    if out is None:
        return f"train: stopped at step {step} of {steps}; nothing was kept, since no folder was given"
    return (
        f"train: stopped at step {step} of {steps}; saved in {str(out)!r}; rerun the same command to resume"
    )
