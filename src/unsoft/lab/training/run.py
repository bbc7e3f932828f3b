"""``train``: one run, from its spec to its result; interrupted runs go on where they stopped."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import TrainerCallback

from unsoft.errors import Interrupted
from unsoft.hf.quiet import quiet
from unsoft.lab.training import processes
from unsoft.lab.training.checkpoints import sweep
from unsoft.lab.training.checks import check_examples
from unsoft.lab.training.final_test import final_result
from unsoft.lab.training.folder import CHECKPOINTS, LOG, claimed, finish, finished
from unsoft.lab.training.model import build
from unsoft.lab.training.progress import ShowProgress, WriteLog
from unsoft.lab.training.repulsion import Repulsion
from unsoft.lab.training.result import Result
from unsoft.lab.training.spec import Spec
from unsoft.lab.training.stopping import StopOnSignal
from unsoft.lab.training.trackers import check_trackers, tracked
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
    """Trains what ``spec`` says and tests it.

    out
        A folder for the run: ``spec.json``, ``log.jsonl``, checkpoints while it goes on, and in the end
        ``model`` (which :func:`unsoft.hf.load` reads) and ``result.json``. If it holds the same run
        unfinished, that is continued, and the weights become bit for bit those of a run that was never
        stopped; if it is finished, its result is returned. Without a folder nothing is kept.
    save_every, eval_every
        Steps from one checkpoint, or look at the score, to the next;
        a tenth of the run unless told otherwise.
    report_to
        Trackers that transformers' Trainer knows, such as ["tensorboard"].
    fsdp
        Under torchrun: every process keeps a part of weights and optimizer (FSDP2), instead of all of it
        (DDP).

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
    for name, value in (("save_every", save_every), ("eval_every", eval_every)):
        if value is not None and value < 1:
            raise ValueError(f"train: argument {name!r} must be at least 1, not {value}")
    if out is not None and (found := finished(Path(out), full.to_dict(), "train")) is not None:
        return Result.from_dict(found)
    _check_processes(full, fsdp)
    check_examples(task)
    check_trackers(report_to or [])
    first, damaged, tenth = processes.is_first(), [], max(1, full.steps // 10)
    with ExitStack() as closing:
        closing.enter_context(tracked(report_to or [], None if out is None else Path(out)))
        closing.enter_context(quiet())
        model = build(full, task)  # first of all: what cannot be built leaves no folder behind
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
        closing.enter_context(stop.listening())
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
                shown.say(f"{name} is not complete and was removed")
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
        if stop.came and trainer.state.global_step < full.steps:
            raise Interrupted(_goodbye(trainer.state.global_step, full.steps, out))
        result = final_result(trainer, seconds)
        if out is not None:
            weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if fsdp else None
            if first:
                finish(folder, model, result.to_dict(), weights=weights)
            processes.wait()
        return result


def _check_processes(spec: Spec, fsdp: bool) -> None:
    """ValueError if the batch cannot be shared, or there is nothing to share."""
    assert spec.batch
    if spec.batch < processes.count():
        raise ValueError(f"train: a batch of {spec.batch} cannot be shared by {processes.count()} processes")
    if fsdp and processes.count() == 1:
        raise ValueError("train: 'fsdp' shares a model among processes; start them with torchrun")
    if fsdp and not torch.accelerator.is_available():
        raise ValueError(
            "train: 'fsdp' needs GPUs: on CPUs accelerate would use DDP in its place without saying so;"
            " leave it out"
        )


def _goodbye(step: int, steps: int, out: str | Path | None) -> str:
    if out is None:
        return f"train: stopped at step {step} of {steps}; nothing was kept, since no folder was given"
    return (
        f"train: stopped at step {step} of {steps}; saved in {str(out)!r}, and the same command goes on from"
        " there"
    )
