"""transformers' Trainer as every run here needs it: sealed checkpoints, a learning rate for the mechanism, a
word when the loss is not finite."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from unsoft.errors import DivergenceError
from unsoft.lab.training import processes
from unsoft.lab.training.checkpoints import seal
from unsoft.lab.training.data import unwrap
from unsoft.lab.training.folder import why_not_written

OWN = ".unsoft."
"""In the name of every parameter that belongs to a mechanism; see :mod:`unsoft.hf.attention`."""


def arguments(
    folder: Path, *, steps: int, lr: float, warmup: int, save_every: int | None, **more: Any
) -> TrainingArguments:
    """Trainer's arguments that all runs share: AdamW (0.9, 0.98), cosine, clipping at 1; data in order, a
    batch an item."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(warmup, steps // 2),
        adam_beta2=0.98,
        max_grad_norm=1.0,
        per_device_train_batch_size=1,  # an item of the data is a whole batch
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
    """Trainer whose checkpoints are whole or not there. ``who`` is the command that errors name."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        who: str,
        mechanism_lr: float,
        **more: Any,
    ) -> None:
        self.network, self.who, self.mechanism_lr = model, who, mechanism_lr
        super().__init__(model, args, data_collator=unwrap, **more)
        self.remove_callback(PrinterCallback)

    def finite(self, loss: Tensor) -> Tensor:
        """The loss itself; DivergenceError if a training step cannot go on with it."""
        if self.network.training and not math.isfinite(loss.item()):
            raise DivergenceError(
                f"{self.who}: the loss is {loss.item()} at step {self.state.global_step + 1}; a smaller"
                f" learning rate than {self.args.learning_rate:g} may help"
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
            rates = (self.args.learning_rate, self.args.learning_rate, self.mechanism_lr)
            decays = (self.args.weight_decay, 0.0, 0.0)
            made = [
                {"params": group, "lr": rate, "weight_decay": decay}
                for group, rate, decay in zip(groups, rates, decays, strict=True)
                if group
            ]
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = torch.optim.AdamW(made, betas=betas, fused=True)
        return self.optimizer

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As Trainer does, and then the seal. What cannot be written whole is removed."""
        folder = Path(self.args.output_dir or "") / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(*args, **kwargs)
            processes.wait()
            if processes.is_first():
                seal(folder)
            processes.wait()
        except Exception as problem:  # of many libraries: safetensors, torch, the operating system
            reason = why_not_written(problem, folder.parent)
            shutil.rmtree(folder, ignore_errors=True)
            kept = "the one before is kept, and the same command goes on from there"
            if not any(folder.parent.glob("checkpoint-*")):
                kept = "it was the first, so the same command begins anew"
            raise OSError(
                f"{self.who}: the checkpoint of step {self.state.global_step} cannot be written to"
                f" {self.args.output_dir}: {reason}; {kept}"
            ) from problem
