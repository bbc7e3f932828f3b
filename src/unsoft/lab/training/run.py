"""``train``: one run, from its spec to its result; interrupted runs resume.

The result has scores over difficulties with their references, and statistics of the attention.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from unsoft.errors import Interrupted
from unsoft.hf.attention import Swapped
from unsoft.hf.quiet import quiet
from unsoft.lab.bench.machine import package_versions
from unsoft.lab.tasks import IGNORE, Task
from unsoft.lab.tasks.language import LanguageTask
from unsoft.lab.training import callbacks
from unsoft.lab.training.callbacks import StepClock, process_count, wait_for_processes
from unsoft.lab.training.folder import CHECKPOINTS, LOG, claimed, finish, finished, sweep
from unsoft.lab.training.language import language_figures
from unsoft.lab.training.model import build
from unsoft.lab.training.repulsion import Repulsion
from unsoft.lab.training.spec import Spec, check_memory, check_whole, tokens_per_step
from unsoft.lab.training.trainer import Batches, TaskTrainer, evaluation_batches, measure, own_values
from unsoft.measure import head_similarity
from unsoft.modules.registry import label_of

_SEEN = 16  # examples on which attention is measured


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one training run: scores, and the references to compare them with."""

    spec: Mapping[str, Any]
    """The complete run."""
    metric: str
    higher_is_better: bool
    score: float
    """On the test of the task's own difficulty."""
    validation: float
    """On the validation examples; learning rates are chosen by this, unless a study names one of
    ``score_by``.
    """
    difficulty: str
    """The knob of the task that varies in ``score_by``; "" if there is none."""
    score_by: list[dict[str, Any]]
    """From easy to hard: the ``value`` of that knob, whether it is ``harder`` than training, the ``score``
    there, that on ``validation`` examples, and those of the ``known`` solution and of the ``shortcut`` on the
    test."""
    chance: float
    known: float
    """The score of the known solution."""
    shortcut: float | None
    """The score of the fallback of a mechanism that lacks what the task tests."""
    further: Mapping[str, float] = field(default_factory=dict)
    """Scores of further tests of the task, by label."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Further measurements of a language model: :mod:`unsoft.lab.training.language`."""
    loss: float
    parameters: int
    started: Mapping[str, list[float]]
    """Initial values of the mechanism's small parameters: t, beta, gamma, ..."""
    learned: Mapping[str, list[float]]
    """Their final values."""
    attention: Mapping[str, list[float]]
    """Statistics of the final attention, for each layer: see :func:`attention_figures` and
    :func:`robustness`.
    """
    steps: int
    seconds: float
    """Time of this session; a resumed run took longer."""
    history: list[dict[str, Any]]
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that ``Result(**data)`` turns back into an equal result."""
        return asdict(self)


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
        return Result(**content)
    _check_processes(full, fsdp)
    check_memory(full)
    _check_examples(task)
    callbacks.check_trackers(report_to or [])
    first, damaged = callbacks.is_first_process(), []
    tenth, part = (max(1, full.steps // count) for count in (10, full.evaluations or 10))
    with ExitStack() as closing:
        closing.enter_context(callbacks.tracked(report_to or [], None if out is None else Path(out)))
        closing.enter_context(quiet())
        model = build(full, task)  # before the folder: a spec that cannot be built leaves none behind
        callbacks.join_processes()
        if out is None:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = Path(out)
            if first:
                closing.enter_context(claimed(folder, full.to_dict(), "train", task.files()))
                damaged = sweep(folder / CHECKPOINTS)[1]
            wait_for_processes()
        stop, clock = callbacks.StopOnSignal(), StepClock()
        closing.enter_context(stop.handling())
        called: list[TrainerCallback] = [stop, clock]
        if first:
            called.append(callbacks.WriteLog(folder / LOG))
        if full.repulse:
            called.append(Repulsion(alpha=full.alpha, kind=full.repulse))
        newest, _ = sweep(folder / CHECKPOINTS)
        if progress and first:
            shown = callbacks.ShowProgress(f"{full.task} {label_of(full.mechanism)}", task.metric)
            closing.callback(shown.close)
            called.append(shown)
            for name in damaged:
                shown.print(f"{name} is not complete and was removed")
        trainer = TaskTrainer(
            model,
            full,
            task,
            folder=folder / CHECKPOINTS,
            save_every=None if out is None else save_every or tenth,
            eval_every=eval_every or part,
            report_to=report_to or [],
            fsdp=fsdp,
            callbacks=called,
        )
        begin = time.perf_counter()
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        seconds = time.perf_counter() - begin
        if stop.received and trainer.state.global_step < full.steps:
            raise Interrupted(_interrupted(trainer.state.global_step, full.steps, out))
        result = final_result(trainer, seconds, clock)
        if out is not None:
            weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if fsdp else None
            if first:
                finish(folder, model, result.to_dict(), weights=weights)
            wait_for_processes()
        return result


def _check_examples(task: Task) -> None:
    """Raise ValueError if an example of a task, perhaps a user's own, cannot be learned."""
    inputs, labels = task.sample(1, training=True)
    asked = labels[labels != IGNORE]
    if not len(asked):
        raise ValueError(f"{task.name}: an example asks nothing: all of its labels are {IGNORE}")
    for what, values, count, knob in (
        ("token", inputs, task.size, "size"),
        ("label", asked, task.outputs, "outputs"),
    ):
        if values.is_floating_point():  # features, images, and labels that are vectors
            continue
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= count:
            wrong = low if low < 0 else high
            raise ValueError(f"{task.name}: the {what} {wrong} is none of the {count} of its {knob!r}")


def _check_processes(spec: Spec, fsdp: bool) -> None:
    """Raise ValueError if the batch or the model cannot be shared by the processes."""
    assert spec.batch
    if spec.batch < process_count():
        raise ValueError(f"train: a batch of {spec.batch} cannot be shared by {process_count()} processes")
    if fsdp and process_count() == 1:
        raise ValueError("train: 'fsdp' shares a model among processes; start them with torchrun")
    if fsdp and not torch.accelerator.is_available():
        raise ValueError(
            "train: 'fsdp' needs GPUs, since accelerate silently falls back to DDP on CPUs; leave it out"
        )


def _interrupted(step: int, steps: int, out: str | Path | None) -> str:
    kept = "nothing was kept, since no folder was given"
    if out is not None:
        kept = f"saved in {str(out)!r}; rerun the same command to resume"
    return f"train: stopped at step {step} of {steps}; {kept}"


def final_result(trainer: TaskTrainer, seconds: float, clock: StepClock) -> Result:
    """Test a trained model and return the result of the run."""
    model, spec, device = trainer.network, trainer.spec, trainer.args.device
    task = trainer.task
    if isinstance(task, LanguageTask):  # the trigram baseline learns from as many tokens as the model
        task = replace(task, counted=tokens_per_step(spec) * trainer.state.global_step)
    tokens = spec.eval_tokens
    own = evaluation_batches(task, trainer.width, tokens=None if tokens is None else 4 * tokens)
    score, loss = measure(model, own, device)
    known, shortcut = references(own)
    score_by = []
    for value, other in zip(task.difficulties(), task.sweep(), strict=True):
        batches = evaluation_batches(other, trainer.width, tokens=tokens)
        validation = evaluation_batches(other, trainer.width, validation=True, tokens=tokens)
        best, fallback = references(batches)
        scores = {"score": measure(model, batches, device)[0]}
        scores["validation"] = measure(model, validation, device)[0]
        about = {"value": value, "harder": value > getattr(task, task.difficulty)}
        score_by.append(about | scores | {"known": best, "shortcut": fallback})
    figures = {}
    if isinstance(task, LanguageTask):
        figures = language_figures(model, task, device) | clock.figures()
    history = callbacks.records(trainer.state)
    evaluated = [record["eval_score"] for record in history if "eval_score" in record]
    return Result(
        spec=spec.to_dict(),
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        score=score,
        validation=evaluated[-1],
        difficulty=task.difficulty,
        score_by=score_by,
        chance=task.chance,
        known=known,
        shortcut=shortcut,
        further={
            label: measure(model, evaluation_batches(other, trainer.width, tokens=tokens), device)[0]
            for label, other in task.further().items()
        },
        figures=figures,
        loss=loss,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        started=trainer.started,
        learned=own_values(model),
        attention=_attention(model, own, device) | robustness(model, own, device),
        steps=trainer.state.global_step,
        seconds=seconds,
        history=history,
        versions=package_versions("transformers"),
    )


@lru_cache(maxsize=16)  # one process performs many runs of a study on the same examples
def references(batches: Batches) -> tuple[float, float | None]:
    """Return the scores of the known solution and of the shortcut on the test examples."""
    task: Task = batches.task
    known, shortcut = [], []
    for index in range(len(batches)):
        inputs, labels = task.sample(batches.size, seed=batches.seed, index=index)
        known.append(task.grade(task.solve(inputs), labels).double())
        outputs = task.shortcut(inputs)
        if outputs is not None:
            shortcut.append(task.grade(outputs, labels).double())
    return torch.cat(known).mean().item(), torch.cat(shortcut).mean().item() if shortcut else None


def _attention(model: PreTrainedModel, batches: Batches, device: torch.device) -> dict[str, list[float]]:
    batch = {name: tensor[:_SEEN].to(device) for name, tensor in batches[0].items()}
    return attention_figures(model, batch, at_rest=batches.task.at_rest(batch.pop("labels")))


@torch.no_grad()
def attention_figures(
    model: PreTrainedModel, inputs: dict[str, Tensor], at_rest: Tensor | None = None
) -> dict[str, list[float]]:
    """Return statistics of the attention of every layer, on one batch of keywords of the model.

    first_token
        Share of all attention (in absolute value) on the first token, without the row that sees nothing else.
        This is the usual attention sink of softmax. Where rows pack documents, it is the first token of each
        document.
    first_token_at_rest
        Only for tasks with rows ``at_rest`` (batch, length), in which the right answer is to do nothing:
        weight on the first token in these rows, from 0 (no sink) to 1 (a sink that takes all). The unit is
        the mean total weight of a row, of the rows at rest or of the others, whichever is larger. So the
        value does not depend on the scale of weights that are not normalised, and the small weights of nearly
        empty rows are not mistaken for a sink, although they may be a large *share* of their row. Rows of
        softmax sum to 1, so there it is the mean weight itself.
    head_diversity
        1 - the mean similarity between the attention patterns of two heads,
        :func:`unsoft.measure.head_similarity`: 0 if all heads are equal, 1 if no two attend to the same keys,
        more if they subtract what others add. Only for two or more heads.

    >>> import unsoft
    >>> spec = unsoft.lab.training.Spec(task="copy", width=16, heads=2).filled()
    >>> task = spec.make_task()
    >>> from unsoft.lab.training.model import build, to_model
    >>> inputs = to_model(task.sample(4), task, 16)
    >>> figures = attention_figures(build(spec, task), {"input_ids": inputs["input_ids"]})
    >>> {name: len(layers) for name, layers in figures.items()}
    {'first_token': 2, 'head_diversity': 2}
    """
    model.eval()
    weights = model(**inputs, output_attentions=True)["attentions"]
    figures = {"first_token": [_first_token(layer, inputs.get("position_ids")) for layer in weights]}
    if at_rest is not None:
        figures["first_token_at_rest"] = [_first_token_at_rest(layer, at_rest) for layer in weights]
    heads = weights[0].shape[1]
    if heads > 1:
        pairs = heads * (heads - 1)
        similar = [head_similarity(layer).mean(0) for layer in weights]
        figures["head_diversity"] = [1 - (one.sum() - one.trace()).item() / pairs for one in similar]
    return figures


@torch.no_grad()
def robustness(model: PreTrainedModel, batches: Batches, device: torch.device) -> dict[str, list[float]]:
    """Return the scores of a model with damaged heads, for each layer.

    Only for scores of which more is better, and for two or more heads.

    pruned_score
        Score without one head, whose output is set to 0; the mean over the heads of the layer.
    perturbed_score
        Score with noise in the output of all heads of the layer. The noise is half as large as the output, by
        the root mean square of each head, and equal in every run.
    """
    layers = [module for module in model.modules() if isinstance(module, Swapped)]
    heads = layers[0].mechanism.layer_spec.heads
    if heads == 1 or not batches.task.higher_is_better:
        return {}

    def score(layer: Swapped, damage: Callable[[Tensor], Tensor]) -> float:
        hook = layer.register_forward_hook(lambda _, inputs, result: (damage(result[0]), result[1]))
        try:
            return measure(model, batches, device)[0]
        finally:
            hook.remove()

    def without(head: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x * (torch.arange(heads, device=x.device) != head)[:, None, None]

    def perturbed(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
        return x + 0.5 * x.square().mean((0, 2, 3), keepdim=True).sqrt() * noise

    return {
        "pruned_score": [fmean(score(layer, without(head)) for head in range(heads)) for layer in layers],
        "perturbed_score": [score(layer, perturbed) for layer in layers],
    }


def _first_token(weights: Tensor, positions: Tensor | None = None) -> float:
    size = weights.double().abs()
    if positions is None:
        positions = torch.arange(size.shape[2], device=size.device).expand(len(size), -1)
    rows = (positions > 0)[:, None].expand(size.shape[:3])  # others see the first token only
    first = torch.arange(size.shape[2], device=size.device) - positions
    on_first = size.gather(-1, first[:, None, :, None].expand(*size.shape[:3], 1)).squeeze(-1)
    return (on_first[rows].sum() / size[rows].sum().clamp(min=torch.finfo(size.dtype).tiny)).item()


def _first_token_at_rest(weights: Tensor, at_rest: Tensor) -> float:
    """Return the mean over heads, each in its own unit."""
    size = weights[:, :, 1:].double().abs().transpose(0, 1)  # heads first: (heads, batch, rows, keys)
    rests = at_rest[:, 1:]
    rows, busy = size[:, rests], size[:, ~rests]
    kinds = [one.sum(-1).mean(-1) for one in (rows, busy) if one.shape[1]]
    unit = torch.stack(kinds).amax(0).clamp(min=torch.finfo(size.dtype).tiny)
    return (rows[..., 0].mean(-1) / unit).mean().item()
