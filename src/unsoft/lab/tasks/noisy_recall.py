"""Noisy recall: in-context recall between tokens that mean nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from unsoft.lab.tasks.in_context_recall import InContextRecall
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import Setup


@register
@dataclass(frozen=True, kw_only=True)
class NoisyRecall(InContextRecall):
    """In-context recall of which a share is noise."""

    name: ClassVar[str] = "noisy-recall"
    tells: ClassVar[str] = "mechanisms that ignore what is irrelevant from those that are diluted by it"

    noise: float = 0.2
    noise_tokens: int = 4
    """With sixteen of them the task is not learned in 800 steps."""

    @property
    def setup(self) -> Setup:
        return replace(super().setup, steps=600)
