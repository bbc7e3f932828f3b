"""transformers' Trainer for tasks: batches by step number, sealed checkpoints, loss and score of a task."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from unsoft.errors import DivergenceError
from unsoft.lab.tasks import IGNORE, Task
from unsoft.lab.training.callbacks import is_first_process, process_count, wait_for_processes
from unsoft.lab.training.folder import seal, why_not_written
from unsoft.lab.training.model import to_model
from unsoft.lab.training.spec import Spec

_TOKENS, _AT_ONCE = 1 << 16, 1 << 14
"""About how many tokens a test has, and how many go through the model at a time."""
_VALIDATION, _TEST = 1, 0
"""Seeds of the validation examples, by which rates are chosen, and of the final test; equal in every run."""
_OUTPUTS = 1 << 25
"""Most outputs of a model at a time, where the number of tokens is set."""
_ANSWERS, _EXAMPLES = 256, 4096
"""Fewest answers and most examples of a test."""


@dataclass(frozen=True)
class Batches(Dataset[dict[str, Tensor]]):
    """Batches of a task, drawn on demand from the number of the step, so that resuming needs no cursor."""

    task: Task
    width: int
    """Width of the model."""
    count: int
    size: int
    """Examples in a batch."""
    seed: int
    training: bool = False
    validation: bool = False
    pieces: int = 1
    """Processes that share each batch: item i is piece i % pieces of batch i // pieces, the order in which
    accelerate distributes items."""

    def __len__(self) -> int:
        return self.count * self.pieces

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, piece = divmod(index, self.pieces)
        batch = self.task.sample(
            self.size, seed=self.seed, index=number, training=self.training, validation=self.validation
        )
        whole = to_model(batch, self.task, self.width)
        return {name: tensor[piece :: self.pieces] for name, tensor in whole.items()}


def evaluation_batches(
    task: Task, width: int, *, validation: bool = False, tokens: int | None = None
) -> Batches:
    """Return the examples on which every model is tested, or validated: fewer if they are long.

    ``tokens`` sets their number; no more than 2**25 outputs then exist at a time.
    """
    seed = _VALIDATION if validation else _TEST
    one = task.sample(1, seed=seed, validation=validation)
    length = one.inputs.shape[1] if task.kind != "image" else 1
    answers = int((one.labels != IGNORE).sum())
    examples = min(max(_TOKENS // length, -(-_ANSWERS // answers)), _EXAMPLES)
    at_once = _AT_ONCE
    if tokens is not None:
        examples, at_once = -(-tokens // length), min(_AT_ONCE, _OUTPUTS // task.outputs)
    size = min(max(at_once // length, 1), examples)
    return Batches(task, width, -(-examples // size), size, seed, validation=validation)


def evaluations_of(spec: Spec) -> list[tuple[Batches, int]]:
    """Return the tests of a run and how often each is taken: validations during training, the final test
    (also with damaged heads), and tests of other difficulties, as often on validation examples.
    """
    task, tokens = spec.make_task(), spec.eval_tokens
    assert spec.steps and spec.width and spec.layers and spec.heads
    validations = spec.steps // max(1, spec.steps // (spec.evaluations or 10))
    damaged = spec.layers * (spec.heads + 1) if spec.heads > 1 and task.higher_is_better else 0
    own = evaluation_batches(task, spec.width, tokens=None if tokens is None else 4 * tokens)
    others = [(other, 2) for other in task.sweep()] + [(other, 1) for other in task.further().values()]
    return [
        (evaluation_batches(task, spec.width, validation=True, tokens=tokens), validations),
        (own, 1 + damaged),
        *((evaluation_batches(other, spec.width, tokens=tokens), times) for other, times in others),
    ]


def unwrap(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the only batch of a list, as a collator."""
    (batch,) = items
    return batch


OWN = ".unsoft."
"""Part of the name of every parameter that belongs to a mechanism; see :mod:`unsoft.hf.attention`."""


def arguments(
    folder: Path,
    *,
    steps: int,
    lr: float,
    warmup: int,
    save_every: int | None,
    beta2: float | None = None,
    final_lr: float | None = None,
    **more: Any,
) -> TrainingArguments:
    """Return Trainer's arguments: AdamW (0.9, 0.98), cosine schedule to 0 or to the share ``final_lr``,
    clipping at 1, one item per batch."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=lr,
        lr_scheduler_type="cosine_with_min_lr" if final_lr else "cosine",
        lr_scheduler_kwargs={"min_lr_rate": final_lr} if final_lr else None,
        warmup_steps=min(warmup, steps // 2),
        # 0.999, the default, averages over 1,000 steps: as many as most runs have
        adam_beta2=0.98 if beta2 is None else beta2,
        max_grad_norm=1.0,
        per_device_train_batch_size=1,  # an item of the dataset is a whole batch
        train_sampling_strategy="sequential",
        use_cpu=not torch.accelerator.is_available(),
        logging_nan_inf_filter=False,
        save_strategy="no" if save_every is None else "steps",
        save_steps=save_every or steps,
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        **more,
    )


class SealedTrainer(Trainer):
    """Trainer whose checkpoints are complete or absent. ``who`` is the command that errors name."""

    def __init__(
        self, model: PreTrainedModel, args: TrainingArguments, *, who: str, mechanism_lr: float, **more: Any
    ) -> None:
        self.network, self.who, self.mechanism_lr = model, who, mechanism_lr
        super().__init__(model, args, data_collator=unwrap, **more)
        self.remove_callback(PrinterCallback)

    def finite(self, loss: Tensor) -> Tensor:
        """Return the loss; DivergenceError if training cannot continue with it."""
        if self.network.training and not math.isfinite(loss.item()):
            raise DivergenceError(
                f"{self.who}: the loss is {loss.item()} at step {self.state.global_step + 1}; a smaller"
                f" learning rate than {self.args.learning_rate:g} may help"
            )
        return loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return AdamW with weight decay for matrices only, and ``mechanism_lr`` for the mechanism's
        parameters.
        """
        if self.optimizer is None:
            groups: tuple[list[nn.Parameter], ...] = ([], [], [])
            for name, parameter in (model or self.network).named_parameters():
                if parameter.requires_grad:
                    groups[2 if OWN in name else int(parameter.dim() < 2)].append(parameter)
            rates = (self.args.learning_rate, self.args.learning_rate, self.mechanism_lr)
            decays = (self.args.weight_decay, 0.0, 0.0)
            options = [
                {"params": group, "lr": rate, "weight_decay": decay}
                for group, rate, decay in zip(groups, rates, decays, strict=True)
                if group
            ]
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = torch.optim.AdamW(options, betas=betas, fused=True)
        return self.optimizer

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save as Trainer does, then write the seal. Remove a checkpoint that cannot be written."""
        folder = Path(self.args.output_dir or "") / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(*args, **kwargs)
            wait_for_processes()
            if is_first_process():
                seal(folder)
            wait_for_processes()
        except Exception as problem:  # of many libraries: safetensors, torch, the operating system
            reason = why_not_written(problem, folder.parent)
            shutil.rmtree(folder, ignore_errors=True)
            kept = "the one before is kept; rerun the same command to resume"
            if not any(folder.parent.glob("checkpoint-*")):
                kept = "it was the first, so the same command starts over"
            raise OSError(
                f"{self.who}: the checkpoint of step {self.state.global_step} cannot be written to"
                f" {self.args.output_dir}: {reason}; {kept}"
            ) from problem


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
        options = arguments(
            folder,
            steps=spec.steps,
            lr=spec.lr,
            warmup=spec.warmup,
            save_every=save_every,
            beta2=spec.beta2,
            final_lr=spec.final_lr,
            weight_decay=spec.weight_decay,
            seed=spec.seed,
            bf16=spec.bf16,
            logging_steps=max(1, spec.steps // 100),
            eval_strategy="steps",
            eval_steps=eval_every,
            report_to=report_to or "none",
            fsdp=True if fsdp else None,
            ddp_find_unused_parameters=task.kind != "tokens",  # features do not go through the embedding
        )
        super().__init__(
            model,
            options,
            who="train",
            mechanism_lr=spec.mechanism_lr,
            train_dataset=Batches(
                task, self.width, spec.steps, spec.batch, spec.seed, training=True, pieces=process_count()
            ),
            eval_dataset=evaluation_batches(task, self.width, validation=True, tokens=spec.eval_tokens),
            compute_loss_func=self._loss,
            callbacks=callbacks,
        )

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = self.finite(self.task.loss(outputs["logits"][..., : self.task.outputs], labels))
        if process_count() > 1:  # pieces of the batch may have different numbers of answers
            loss = loss * ((labels != IGNORE).sum() / num_items_in_batch)
        return loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return score and loss on the validation examples, over all answers of all batches."""
        assert isinstance(self.eval_dataset, Batches)
        score, loss = measure(self.network, self.eval_dataset, self.args.device)
        metrics = {"eval_score": score, "eval_loss": loss}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def own_values(model: nn.Module) -> dict[str, list[float]]:
    """Return the values of a mechanism's small parameters; logarithms are exponentiated."""
    values_by_name = {}
    for name, parameter in model.named_parameters():
        if OWN in name and parameter.numel() <= _FEW:
            whole = getattr(parameter, "full_tensor", None)  # FSDP: each process has a part
            values = (parameter if whole is None else whole()).detach().float().flatten()
            where, _, last = name.rpartition(".")
            if last.startswith("log_"):
                name, values = f"{where}.{last.removeprefix('log_')}", values.exp()
            values_by_name[name] = values.tolist()
    return values_by_name


@torch.no_grad()
def measure(model: nn.Module, batches: Batches, device: torch.device) -> tuple[float, float]:
    """Return score and loss of a model, over all answers."""
    model.eval()
    task, grades, losses = batches.task, [], []
    for index in range(len(batches)):
        batch = {name: tensor.to(device) for name, tensor in batches[index].items()}
        labels = batch.pop("labels")
        outputs = model(**batch)["logits"][..., : task.outputs]
        grades.append(task.grade(outputs, labels).double())
        losses.append(task.loss(outputs, labels).item())
    return torch.cat(grades).mean().item(), sum(losses) / len(losses)
