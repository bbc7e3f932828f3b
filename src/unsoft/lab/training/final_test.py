"""The result of a run: scores over difficulties with their references, and statistics of the attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from unsoft.lab.bench.machine import package_versions
from unsoft.lab.tasks import Task
from unsoft.lab.training.callbacks import records
from unsoft.lab.training.trainer import Batches, TaskTrainer, evaluation_batches, measure, own_values
from unsoft.measure import head_similarity


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
    loss: float
    parameters: int
    started: Mapping[str, list[float]]
    """Initial values of the mechanism's small parameters: t, beta, gamma, ..."""
    learned: Mapping[str, list[float]]
    """Their final values."""
    attention: Mapping[str, list[float]]
    """Statistics of the final attention, for each layer: see :func:`attention_figures`."""
    steps: int
    seconds: float
    """Time of this session; a resumed run took longer."""
    history: list[dict[str, Any]]
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that :meth:`from_dict` turns back into an equal result."""
        return asdict(self)

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Result:
        """Return the result of :meth:`to_dict`."""
        return Result(**content)


_SEEN = 16  # examples on which attention is measured


def final_result(trainer: TaskTrainer, seconds: float) -> Result:
    """Test a trained model and return the result of the run."""
    model, spec, task = trainer.network, trainer.spec, trainer.task
    device = trainer.args.device
    own = evaluation_batches(task, trainer.width)
    score, loss = measure(model, own, device)
    known, shortcut = _references(own)
    score_by = []
    for value, other in zip(task.difficulties(), task.sweep(), strict=True):
        batches = evaluation_batches(other, trainer.width)
        validation = evaluation_batches(other, trainer.width, validation=True)
        best, fallback = _references(batches)
        score_by.append(
            {
                "value": value,
                "harder": value > getattr(task, task.difficulty),
                "score": measure(model, batches, device)[0],
                "validation": measure(model, validation, device)[0],
                "known": best,
                "shortcut": fallback,
            }
        )
    history = records(trainer.state)
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
        loss=loss,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        started=trainer.started,
        learned=own_values(model),
        attention=_attention(model, own, device),
        steps=trainer.state.global_step,
        seconds=seconds,
        history=history,
        versions=package_versions("transformers"),
    )


def _references(batches: Batches) -> tuple[float, float | None]:
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
        This is the usual attention sink of softmax.
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
    figures = {"first_token": [_first_token(layer) for layer in weights]}
    if at_rest is not None:
        figures["first_token_at_rest"] = [_first_token_at_rest(layer, at_rest) for layer in weights]
    heads = weights[0].shape[1]
    if heads > 1:
        pairs = heads * (heads - 1)
        similar = [head_similarity(layer).mean(0) for layer in weights]
        figures["head_diversity"] = [1 - (one.sum() - one.trace()).item() / pairs for one in similar]
    return figures


def _first_token(weights: Tensor) -> float:
    size = weights[:, :, 1:].double().abs()
    return (size[..., 0].sum() / size.sum().clamp(min=torch.finfo(size.dtype).tiny)).item()


def _first_token_at_rest(weights: Tensor, at_rest: Tensor) -> float:
    """Return the mean over heads, each in its own unit."""
    size = weights[:, :, 1:].double().abs().transpose(0, 1)  # heads first: (heads, batch, rows, keys)
    rests = at_rest[:, 1:]
    rows, busy = size[:, rests], size[:, ~rests]
    kinds = [one.sum(-1).mean(-1) for one in (rows, busy) if one.shape[1]]
    unit = torch.stack(kinds).amax(0).clamp(min=torch.finfo(size.dtype).tiny)
    return (rows[..., 0].mean(-1) / unit).mean().item()
