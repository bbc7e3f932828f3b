"""Induction: predict the token that followed the last occurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import distinct, take
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import Batch, Retelling, Setup, chosen, labelled_last


@register
@dataclass(frozen=True, kw_only=True)
class Induction(Retelling):
    """Different tokens in random order, then some of them again in another order:
    each asks for the token that followed it."""

    name: ClassVar[str] = "induction"
    tells: ClassVar[str] = (
        "mechanisms from which two layers build an induction head, also at lengths not seen in training"
    )
    source: ClassVar[str] = "Olsson et al. 2022 (arXiv 2209.11895)"

    difficulty: ClassVar[str] = "length"

    length: int = 8
    """Tokens before the questions."""
    questions: int = 7
    vocabulary: int = 32

    def __post_init__(self) -> None:
        self.at_least(2, "length", "vocabulary")
        self.at_least(1, "questions")
        self.require(
            self.length <= self.vocabulary,
            f"{self.length} different tokens need a vocabulary of as many, not {self.vocabulary}",
        )
        self.require(
            self.questions < self.length,
            f"a length of {self.length} allows at most {self.length - 1} questions, not {self.questions}",
        )

    @property
    def setup(self) -> Setup:
        return Setup(layers=2, steps=600, positions=True)

    @property
    def size(self) -> int:
        return self.vocabulary

    def difficulties(self) -> tuple[int, ...]:
        own = self.length
        return tuple(length for length in (own, 2 * own, 4 * own) if length <= self.vocabulary)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        tokens = distinct(count, self.vocabulary, self.length, random)
        which = distinct(count, self.length - 1, self.questions, random)
        return labelled_last(torch.cat([tokens, take(tokens, which)], 1), take(tokens, which + 1))

    def solve(self, inputs: Tensor) -> Tensor:
        """Find the token among those before the questions, and take the next."""
        before = inputs[:, : self.length]
        index = (inputs[:, :, None] == before[:, None]).long().argmax(-1)
        return chosen(take(before, (index + 1).clamp(max=self.length - 1)), self.outputs)
