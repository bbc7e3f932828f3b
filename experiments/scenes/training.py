"""Train the model of the scenes, in a minute or two of one core; an interrupted run can be resumed."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    LlavaForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from experiments.scenes.captions import NUMBER, PAD, PROMPT, training_caption, training_scene
from experiments.scenes.model import build_model
from unsoft.errors import Interrupted
from unsoft.files import write_json
from unsoft.hf.quiet import quiet
from unsoft.lab.training.callbacks import ShowProgress, StopOnSignal, WriteLog
from unsoft.lab.training.folder import seal, sweep
from unsoft.lab.training.trainer import unwrap

_SETTINGS, _MODEL, _CHECKPOINTS, _LOG = "scenes.json", "model", "checkpoints", "log.jsonl"


@dataclass(frozen=True)
class Settings:
    """Everything that determines the weights."""

    steps: int = 500
    batch: int = 64
    lr: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"scenes: argument {name!r} must be at least 1, not {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"scenes: argument 'seed' must be at least 0, not {self.seed}")


def train_scenes(
    folder: Path, settings: Settings | None = None, *, progress: bool = False
) -> LlavaForConditionalGeneration:
    """Train the model in ``folder``, or load it if it is already trained.

    Ctrl-C and SIGTERM save a checkpoint and raise :class:`unsoft.errors.Interrupted`; the same call resumes
    and reaches the same weights bit for bit.
    """
    settings = settings or Settings()
    _claim(folder, settings)
    if (folder / _MODEL).is_dir():
        with quiet():
            kept: LlavaForConditionalGeneration = LlavaForConditionalGeneration.from_pretrained(
                folder / _MODEL
            )
            kept.eval()
            return kept
    with ExitStack() as closing:
        closing.enter_context(quiet())
        stop = StopOnSignal()
        closing.enter_context(stop.handling())
        callbacks: list[TrainerCallback] = [stop, WriteLog(folder / _LOG), _SealCheckpoints()]
        if progress:
            shown = ShowProgress("scenes", "loss")
            closing.callback(shown.close)
            callbacks.append(shown)
        newest, _ = sweep(folder / _CHECKPOINTS)
        trainer = _SceneTrainer(
            build_model(settings.seed),
            _arguments(settings, folder / _CHECKPOINTS),
            train_dataset=_Batches(settings),
            data_collator=unwrap,
            callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
        step = trainer.state.global_step
        if stop.received and step < settings.steps:
            raise Interrupted(
                f"scenes: stopped at step {step} of {settings.steps}; checkpoint saved in {str(folder)!r};"
                " rerun the same command to resume"
            )
        model: LlavaForConditionalGeneration = trainer.model.eval()  # type: ignore[union-attr,assignment]
        _keep(model, folder)
        return model


def _claim(folder: Path, settings: Settings) -> None:
    """Claim the folder for this run; raise ValueError if it contains something else."""
    written, mine = folder / _SETTINGS, asdict(settings)
    if not written.exists():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(
                f"scenes: {str(folder)!r} is not empty and holds no scenes; choose another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_json(written, mine)
        return
    theirs = json.loads(written.read_bytes())
    if other := ", ".join(f"{name} {theirs.get(name)}" for name in mine if theirs.get(name) != mine[name]):
        raise ValueError(f"scenes: {str(folder)!r} holds another run ({other}); choose another folder")


def _keep(model: LlavaForConditionalGeneration, folder: Path) -> None:
    unfinished = folder / f".{_MODEL}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    os.replace(unfinished, folder / _MODEL)
    shutil.rmtree(folder / _CHECKPOINTS, ignore_errors=True)


@dataclass(frozen=True)
class _Batches(Dataset[dict[str, Tensor]]):
    """Item i is a whole batch, drawn from its number, so that resuming needs no cursor."""

    settings: Settings

    def __len__(self) -> int:
        return self.settings.steps

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + index)
        scenes = [training_scene(generator) for _ in range(self.settings.batch)]
        captions = [[NUMBER[word] for word in training_caption(scene, generator)] for scene in scenes]
        longest = len(PROMPT) + max(map(len, captions))
        ids = torch.full((len(scenes), longest), NUMBER[PAD])
        labels = torch.full_like(ids, -100)
        for row, caption in enumerate(captions):
            end = len(PROMPT) + len(caption)
            ids[row, : len(PROMPT)] = torch.tensor(PROMPT)
            ids[row, len(PROMPT) : end] = labels[row, len(PROMPT) : end] = torch.tensor(caption)
        pixels = torch.stack([scene.picture() for scene in scenes])
        # Padding is on the right, so causal attention never sees it.
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": pixels,
            "labels": labels,
        }


class _SceneTrainer(Trainer):
    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        """Load the weights: transformers saves a LLaVA under older names, which its Trainer cannot read."""
        kept = LlavaForConditionalGeneration.from_pretrained(resume_from_checkpoint)
        (model or self.model).load_state_dict(kept.state_dict())  # type: ignore[union-attr]


class _SealCheckpoints(TrainerCallback):
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Mark the checkpoint as complete."""
        seal(Path(args.output_dir or "") / f"checkpoint-{state.global_step}")


def _arguments(settings: Settings, folder: Path) -> TrainingArguments:
    tenth = max(1, settings.steps // 10)
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(50, settings.steps // 2),
        adam_beta2=0.98,
        weight_decay=0.01,
        max_grad_norm=1.0,
        per_device_train_batch_size=1,  # an item of the data is a whole batch
        train_sampling_strategy="sequential",
        seed=settings.seed,
        use_cpu=True,  # fastest for this size, and the same numbers everywhere
        logging_steps=tenth,
        save_steps=tenth,
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
    )
