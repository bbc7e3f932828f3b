"""The test at the end of a run: scores over difficulties, what they are compared with, what was learned."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

import unsoft
from unsoft.lab.tasks import Task
from unsoft.lab.training.attention_figures import attention_figures
from unsoft.lab.training.data import Batches, evaluation_batches
from unsoft.lab.training.progress import records
from unsoft.lab.training.result import Result
from unsoft.lab.training.trainer import TaskTrainer, measure, own_values

_SEEN = 16  # examples on which attention is looked at


def final_result(trainer: TaskTrainer, seconds: float) -> Result:
    """Tests what a trainer has trained."""
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
    watched = [record["eval_score"] for record in history if "eval_score" in record]
    return Result(
        spec=spec.to_dict(),
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        score=score,
        validation=watched[-1],
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
        versions={
            "unsoft": unsoft.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def _references(batches: Batches) -> tuple[float, float | None]:
    """The scores of the known solution and of the shortcut, on the examples on which a model is tested."""
    task: Task = batches.task
    known, shortcut = [], []
    for index in range(len(batches)):
        inputs, labels = task.sample(batches.size, seed=batches.seed, index=index)
        known.append(task.grade(task.solve(inputs), labels).double())
        found = task.shortcut(inputs)
        if found is not None:
            shortcut.append(task.grade(found, labels).double())
    return torch.cat(known).mean().item(), torch.cat(shortcut).mean().item() if shortcut else None


def _attention(model: PreTrainedModel, batches: Batches, device: torch.device) -> dict[str, list[float]]:
    batch = {name: tensor[:_SEEN].to(device) for name, tensor in batches[0].items()}
    return attention_figures(model, batch, at_rest=batches.task.at_rest(batch.pop("labels")))
