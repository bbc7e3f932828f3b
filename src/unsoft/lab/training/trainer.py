"""Trainer for a task: its loss and score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from unsoft.lab.tasks import Task
from unsoft.lab.tasks.task import IGNORE
from unsoft.lab.training import processes
from unsoft.lab.training.data import Batches, evaluation_batches
from unsoft.lab.training.sealed_trainer import OWN, SealedTrainer, arguments
from unsoft.lab.training.spec import Spec

_FEW = 32


class TaskTrainer(SealedTrainer):
    """Trainer with a task's loss and score."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: Spec,
        task: Task,
        *,
        folder: Path,
        save_every: int | None,
        eval_every: int,
        report_to: list[str],
        fsdp: bool,
        callbacks: list[TrainerCallback],
    ) -> None:
        assert spec.steps and spec.batch and spec.lr is not None
        self.spec, self.task = spec, task
        self.width: int = model.config.hidden_size
        self.started = own_values(model)
        super().__init__(
            model,
            _arguments(spec, task.kind, folder, save_every, eval_every, report_to, fsdp),
            who="train",
            mechanism_lr=spec.mechanism_lr,
            train_dataset=Batches(
                task, self.width, spec.steps, spec.batch, spec.seed, training=True, pieces=processes.count()
            ),
            eval_dataset=evaluation_batches(task, self.width, validation=True),
            compute_loss_func=self._loss,
            callbacks=callbacks,
        )

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = self.finite(self.task.loss(outputs["logits"][..., : self.task.outputs], labels))
        if processes.count() > 1:  # each has a piece of the batch, perhaps with more answers than another
            loss = loss * ((labels != IGNORE).sum() / num_items_in_batch)
        return loss

    def evaluate(
        self,
        eval_dataset: Dataset[Any] | dict[str, Dataset[Any]] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Score and loss, over all answers of all batches."""
        batches = eval_dataset if isinstance(eval_dataset, Batches) else self.eval_dataset
        assert isinstance(batches, Batches)
        score, loss = measure(self.network, batches, self.args.device)
        found = {f"{metric_key_prefix}_score": score, f"{metric_key_prefix}_loss": loss}
        self.log(dict(found))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found


def own_values(model: nn.Module) -> dict[str, list[float]]:
    """The values of a mechanism's own parameters, where they are few; of a logarithm the number itself."""
    found = {}
    for name, parameter in model.named_parameters():
        if OWN in name and parameter.numel() <= _FEW:
            whole = getattr(parameter, "full_tensor", None)  # of a parameter that processes share
            values = (parameter if whole is None else whole()).detach().float().flatten()
            where, _, last = name.rpartition(".")
            if last.startswith("log_"):
                name, values = f"{where}.{last.removeprefix('log_')}", values.exp()
            found[name] = values.tolist()
    return found


@torch.no_grad()
def measure(model: nn.Module, batches: Batches, device: torch.device) -> tuple[float, float]:
    """Score and loss of a model, over all answers."""
    model.eval()
    task, grades, losses = batches.task, [], []
    for index in range(len(batches)):
        batch = {name: tensor.to(device) for name, tensor in batches[index].items()}
        labels = batch.pop("labels")
        outputs = model(**batch)["logits"][..., : task.outputs]
        grades.append(task.grade(outputs, labels).double())
        losses.append(task.loss(outputs, labels).item())
    return torch.cat(grades).mean().item(), sum(losses) / len(losses)


def _arguments(
    spec: Spec,
    kind: str,
    folder: Path,
    save_every: int | None,
    eval_every: int,
    report_to: list[str],
    fsdp: bool,
) -> TrainingArguments:
    assert spec.steps and spec.lr is not None
    return arguments(
        folder,
        steps=spec.steps,
        lr=spec.lr,
        warmup=spec.warmup,
        save_every=save_every,
        weight_decay=spec.weight_decay,
        seed=spec.seed,
        bf16=spec.bf16,
        logging_steps=max(1, spec.steps // 100),
        eval_strategy="steps",
        eval_steps=eval_every,
        report_to=report_to or "none",
        fsdp=True if fsdp else None,
        ddp_find_unused_parameters=kind != "tokens",  # features do not go through the embedding
    )
