"""Focus: find one key, in contexts much longer than in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import blurred, directions, distinct, integers, take
from unsoft.lab.tasks.evidence import Lookup, items, pointing, question, saying
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import Batch, Setup, chosen, labelled_last


@register
@dataclass(frozen=True, kw_only=True)
class Focus(Lookup):
    """Find the label of the item with the direction of the question. All others have random directions; each
    question asks for another item.
    """

    name: ClassVar[str] = "focus"
    tells: ClassVar[str] = "mechanisms that still find one key as contexts grow from those that spread out"
    source: ClassVar[str] = "the setting of Su 2023 (focus of attention), trained"
    difficulty: ClassVar[str] = "length"

    length: int = 128
    """Items and questions."""
    questions: int = 32
    labels: int = 16
    dim: int = 8

    def __post_init__(self) -> None:
        self.at_least(1, "questions")
        self.at_least(2, "labels", "dim")
        self.between(0, 1, "noise")
        self.at_least(1, "length")
        self.require(
            self.length >= 2 * self.questions,
            f"{self.questions} questions need a length of at least {2 * self.questions}, not {self.length}",
        )

    @property
    def setup(self) -> Setup:
        return Setup(steps=400, batch=8)

    def difficulties(self) -> tuple[int, ...]:
        shorter = max(self.length // 2, 2 * self.questions)
        return tuple(sorted({shorter, *(self.length * factor for factor in (1, 4, 8, 32))}))

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        many = self.length - self.questions
        where = directions((count, many, self.dim), random)
        values = integers(self.labels, (count, many), random)
        which = distinct(count, many, self.questions, random)
        asked = question(blurred(take(where, which), self.noise, random), self.labels, 1)
        return labelled_last(torch.cat([items(where, values, self.labels, 1), asked], 1), take(values, which))

    def solve(self, inputs: Tensor) -> Tensor:
        """Take the item with the largest cosine to the question."""
        where, many = pointing(inputs, self.dim), self.length - self.questions
        nearest = (where @ where[:, :many].mT).argmax(-1)
        return chosen(take(saying(inputs[:, :many], self.dim, self.labels), nearest), self.labels)
