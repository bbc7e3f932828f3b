"""The two stages, each a run of Trainer that can be stopped and resumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from unsoft.lab.training.conversion.matching import Pair
from unsoft.lab.training.conversion.spec import Conversion
from unsoft.lab.training.conversion.text import TextBatches, Windows
from unsoft.lab.training.sealed_trainer import SealedTrainer, arguments

FIT, MATCH, TUNE = "fit", "match", "tune"


@dataclass(frozen=True)
class Stage:
    """One of both: what it is called and how long it trains."""

    name: str
    steps: int
    lr: float


def stages(spec: Conversion) -> tuple[Stage, Stage]:
    """Matching, then tuning."""
    return Stage(MATCH, spec.match_steps, spec.match_lr), Stage(TUNE, spec.tune_steps, spec.tune_lr)


class StageTrainer(SealedTrainer):
    """Trainer whose loss is the mean error of the layers, or that of the next token."""

    def __init__(
        self,
        stage: Stage,
        pair: Pair,
        spec: Conversion,
        text: Windows,
        folder: Path,
        save_every: int | None,
        callbacks: list[TrainerCallback],
    ) -> None:
        self.stage, self.pair = stage, pair
        super().__init__(
            pair.student,
            arguments(
                folder,
                steps=stage.steps,
                lr=stage.lr,
                warmup=max(1, stage.steps // 10),
                save_every=save_every or max(1, -(-stage.steps // 4)),
                weight_decay=0.0,
                seed=spec.seed,
                logging_steps=max(1, stage.steps // 10),
                report_to="none",
            ),
            who="convert",
            mechanism_lr=spec.mechanism_lr,
            train_dataset=TextBatches(text, stage.name, stage.steps, spec.batch, spec.seed),
            callbacks=callbacks,
        )

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Any:
        """Of a batch of texts."""
        if self.stage.name == TUNE:
            return self.finite(model(**inputs, use_cache=False).loss)
        model.eval()  # the original has no dropout, so neither has what is matched to it
        return self.finite(self.pair.errors(inputs["input_ids"]).mean())
