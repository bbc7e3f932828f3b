"""transformers' Trainer for a task: its loss and score, a learning rate for the mechanism,
and checkpoints that are sealed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from unsoft.errors import DivergenceError
from unsoft.tasks import Task
from unsoft.training.checkpoints import seal
from unsoft.training.data import Batches, evaluation_batches, unwrap
from unsoft.training.spec import Spec

OWN = ".unsoft."
"""In the name of every parameter that belongs to a mechanism; see :mod:`unsoft.hf.attention`."""
_VALIDATION = 1  # seed of the examples on which runs are watched; the final test has others


class TaskTrainer(Trainer):
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
        callbacks: list[TrainerCallback],
    ) -> None:
        assert spec.steps and spec.batch and spec.lr is not None
        self.spec, self.task, self.network = spec, task, model
        self.width: int = model.config.hidden_size
        super().__init__(
            model,
            _arguments(spec, folder, save_every, eval_every, report_to),
            train_dataset=Batches(task, self.width, spec.steps, spec.batch, spec.seed, training=True),
            eval_dataset=evaluation_batches(task, self.width, _VALIDATION),
            data_collator=unwrap,
            compute_loss_func=self._loss,
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = self.task.loss(outputs["logits"][..., : self.task.outputs], labels)
        if self.network.training and not math.isfinite(loss.item()):
            raise DivergenceError(
                f"train: the loss is {loss.item()} at step {self.state.global_step + 1}; a smaller learning"
                f" rate than {self.spec.lr:g} may help"
            )
        return loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW: weight decay for matrices only, and for the mechanism's own parameters a learning rate of
        their own."""
        if self.optimizer is None:
            groups: tuple[list[nn.Parameter], ...] = ([], [], [])
            for name, parameter in (model or self.network).named_parameters():
                if parameter.requires_grad:
                    groups[2 if OWN in name else int(parameter.dim() < 2)].append(parameter)
            rates = (self.spec.lr, self.spec.lr, self.spec.mechanism_lr)
            decays = (self.spec.weight_decay, 0.0, 0.0)
            made = [
                {"params": group, "lr": rate, "weight_decay": decay}
                for group, rate, decay in zip(groups, rates, decays, strict=True)
                if group
            ]
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = torch.optim.AdamW(made, betas=betas, fused=True)
        return self.optimizer

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

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As Trainer does, and then the seal. What cannot be written whole is removed."""
        folder = Path(self.args.output_dir or "") / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(*args, **kwargs)
            seal(folder)
        except Exception as problem:  # of many libraries: safetensors, torch, the operating system
            shutil.rmtree(folder, ignore_errors=True)
            reason = getattr(problem, "strerror", None) or str(problem)
            raise OSError(
                f"train: the checkpoint of step {self.state.global_step} cannot be written to"
                f" {self.args.output_dir}: {reason}; the one before is kept, and the same command goes on"
                " from there"
            ) from problem


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
    spec: Spec, folder: Path, save_every: int | None, eval_every: int, report_to: list[str]
) -> TrainingArguments:
    assert spec.steps and spec.lr is not None
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=spec.steps,
        learning_rate=spec.lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(spec.warmup, spec.steps // 2),
        adam_beta2=0.98,
        max_grad_norm=1.0,
        per_device_train_batch_size=1,  # an item of the data is a whole batch
        train_sampling_strategy="sequential",
        seed=spec.seed,
        bf16=spec.bf16,
        use_cpu=not torch.accelerator.is_available(),
        logging_steps=max(1, spec.steps // 100),
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=eval_every,
        save_strategy="no" if save_every is None else "steps",
        save_steps=save_every or spec.steps,
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=report_to or "none",
    )
