"""Cost of a study before it runs, steps for a budget, and larger copies of a study."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from unsoft.checks import finite
from unsoft.lab.bench.machine import threads
from unsoft.lab.training.spec import flops_per_step, tokens_per_step

if TYPE_CHECKING:
    from unsoft.lab.study.plan import Study
    from unsoft.lab.training import Spec

BUDGETS = ("tokens", "flops", "seconds")
_FEWEST_STEPS = 3
"""Steps of a probe; the first does not count, since it may compile kernels."""
_MOST_STEPS = 100
_LONGEST = 1000.0
"""Largest factor of a scale: beyond it the recipe is a guess."""


@dataclass(frozen=True)
class Cost:
    """Cost of the runs of one mechanism in a study."""

    group: str
    mechanism: str
    runs: int
    tokens: int
    seconds: float
    """With evaluations."""
    evaluation_seconds: float
    measured: bool
    """False if the time is estimated from another mechanism's, by FLOPs."""


def seconds_per_step(specs: Sequence[Spec], seconds: float = 5.0) -> list[float]:
    """Return the time of a training step of each spec, the smallest of several. Specs take turns, so that
    load on the machine meets all of them.

    On a CPU it is the processor time of one thread, which is what a worker has; other processes hardly
    change it.
    """
    from unsoft.lab.training.model import to_model

    models, best = [], [float("inf")] * len(specs)
    for spec in specs:
        model = _model_of(spec)
        models.append((model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)))
    begin, rounds = time.perf_counter(), 0
    with threads(1):
        while rounds < _FEWEST_STEPS or time.perf_counter() - begin < seconds:
            for number, (spec, (model, optimizer)) in enumerate(zip(specs, models, strict=True)):
                task = spec.make_task()
                assert spec.batch and spec.width
                batch = to_model(task.sample(spec.batch, index=rounds, training=True), task, spec.width)
                batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
                labels, start = batch.pop("labels"), _clock()
                task.loss(model(**batch)["logits"][..., : task.outputs], labels).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if rounds:
                    best[number] = min(best[number], _clock() - start)
            rounds += 1
    return best


def training_seconds(spec: Spec, seconds: float) -> float:
    """Return the time of a step of a run, with its data and Trainer's own work, which is a third of the time
    of the smallest models.
    """
    from transformers import TrainerCallback

    from unsoft.hf.quiet import quiet
    from unsoft.lab.training.model import build
    from unsoft.lab.training.trainer import TaskTrainer

    begin, ends = time.perf_counter(), list[float]()

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(_clock())
            is_long = len(ends) > _FEWEST_STEPS and time.perf_counter() - begin > seconds
            control.should_training_stop |= is_long

    task, spec = spec.make_task(), replace(spec, steps=_MOST_STEPS)
    options: dict[str, Any] = {"save_every": None, "eval_every": 2 * _MOST_STEPS, "report_to": []}
    options |= {"fsdp": False, "callbacks": [Clock()]}
    with quiet(), threads(1), tempfile.TemporaryDirectory() as folder:
        TaskTrainer(build(spec, task), spec, task, folder=Path(folder), **options).train()
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def evaluation_seconds(spec: Spec) -> float:
    """Return the time of all evaluations of a run, from one batch of each of its tests.

    Reference scores are left out: a worker computes them once for all runs of a task.
    """
    from unsoft.lab.training.trainer import evaluations_of, measure

    model, total = _model_of(spec), 0.0
    with threads(1):
        for batches, times in evaluations_of(spec):
            start = _clock()
            measure(model, replace(batches, count=1), model.device)
            total += (_clock() - start) * batches.count * times
    return total


def _model_of(spec: Spec) -> Any:
    """Return the model of a run on the device that would train it."""
    from unsoft.lab.training.model import build

    model: Any = build(spec, spec.make_task())
    return model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")


def _clock() -> float:
    if not torch.accelerator.is_available():
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def check_budget(budget: Mapping[str, Any]) -> None:
    """Raise ValueError unless a budget is one positive number of tokens, flops or seconds.

    >>> check_budget({"hours": 1})
    Traceback (most recent call last):
    ValueError: study: 'budget' must be one of tokens, flops, seconds with a number over 0, not {'hours': 1}
    """
    if not budget:
        return
    (name, value), *more = budget.items()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if more or name not in BUDGETS or not is_number or finite("study", name, value) <= 0:
        raise ValueError(
            f"study: 'budget' must be one of {', '.join(BUDGETS)} with a number over 0, not {dict(budget)}"
        )


def steps_for(spec: Spec, budget: Mapping[str, float]) -> int:
    """Return the steps that a budget pays for, at least one.

    >>> from unsoft.lab.training import Spec
    >>> steps_for(Spec(task="copy", knobs={"length": 8}, batch=4).filled(), {"tokens": 640})
    10
    """
    ((name, value),) = budget.items()
    if name == "seconds":
        each = seconds_per_step([spec])[0]
    else:
        each = tokens_per_step(spec) if name == "tokens" else flops_per_step(spec)
    return max(1, round(value / each))


def costs(study: Study, seconds: float = 10.0) -> list[Cost]:
    """Return the cost of each mechanism of a study, from a probe of about ``seconds``, and one batch of each
    test. Mechanisms for which no time is left are estimated by FLOPs from those before them.
    """
    per_flop: list[tuple[float, float]] = []  # of a step, and of the evaluations of a run
    begin, rows = time.perf_counter(), []
    for group in study.groups:
        for variant in group.variants:
            runs = study.expected_runs(group, variant)
            spec = runs[0].spec
            steps = [int(run.spec.steps or 0) for run in runs]
            probed = not per_flop or time.perf_counter() - begin < seconds
            flops = flops_per_step(spec)
            if probed:
                step = training_seconds(spec, seconds / 20)
                per_flop.append((step / flops, evaluation_seconds(spec) / flops))
            known = zip(*per_flop[-1 if probed else 0 :], strict=True)
            step, tests = (flops * fmean(values) for values in known)
            tokens, testing = tokens_per_step(spec) * sum(steps), tests * len(runs)
            times = {"seconds": step * sum(steps) + testing, "evaluation_seconds": testing}
            rows.append(Cost(group.name, variant.label, len(runs), tokens, **times, measured=probed))
    return rows


def scaled(study: Study, factor: float) -> Study:
    """Return the study with ``factor`` times the parameters and tokens.

    Width and layers grow with the cube root of the factor, so that the weights of the layers grow with it.
    The width of a head and the batch stay, and steps grow with the factor. Rates fall as the width grows
    (Yang 2022). Variants with settings of their own keep them.
    """
    if not 1 < finite("study", "scale", factor) <= _LONGEST:
        raise ValueError(f"study: 'scale' must be over 1 and at most {_LONGEST:g}, not {factor:g}")
    groups, ratios = [], []
    for group in study.groups:
        spec = study.expected_runs(group, group.variants[0])[-1].spec
        assert spec.width and spec.heads and spec.layers and spec.mlp and spec.steps
        heads = max(1, round(spec.heads * factor ** (1 / 3)))
        width = spec.width // spec.heads * heads
        layers = max(1, round(spec.layers * factor * spec.width**2 / width**2))
        sizes = {"width": width, "heads": heads, "layers": layers, "steps": round(spec.steps * factor)}
        sizes["mlp"] = -(-spec.mlp * width // spec.width // 8) * 8
        groups.append(replace(group, settings={**group.settings, **sizes}))
        ratios.append(spec.width / width)
    lower = sum(ratios) / len(ratios)
    points = tuple({**point, "lr": float(f"{point['lr'] * lower:.3g}")} for point in study.points)
    tuning = None if study.tuning_steps is None else round(study.tuning_steps * factor)
    name = f"{study.name}-{factor:g}x"
    return replace(study, name=name, groups=tuple(groups), points=points, tuning_steps=tuning)
