"""Selective copy: repeat the tokens that are not blank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import distinct, integers
from unsoft.lab.tasks.in_context_recall import MAD
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import Batch, Retelling, Setup, chosen, labelled_last


@register
@dataclass(frozen=True, kw_only=True)
class SelectiveCopy(Retelling):
    """Tokens at random places between blanks, a mark, and as many blanks as tokens: say them there,
    in their order."""

    name: ClassVar[str] = "selective-copy"
    tells: ClassVar[str] = (
        "mechanisms that pick by content and keep the order from those that copy by distance"
    )
    source: ClassVar[str] = MAD

    length: int = 20
    tokens: int = 4
    """Number of tokens to copy."""
    vocabulary: int = 8

    def __post_init__(self) -> None:
        self.at_least(1, "tokens")
        self.at_least(2, "vocabulary")
        self.at_least(2 * self.tokens + 1, "length")

    @property
    def setup(self) -> Setup:
        return Setup(layers=2, heads=2, steps=800, positions=True)

    @property
    def size(self) -> int:
        return self.vocabulary + 2

    @property
    def outputs(self) -> int:
        return self.vocabulary

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        blank, mark = self.vocabulary, self.vocabulary + 1
        inputs = torch.full((count, self.length), blank)
        free = self.length - self.tokens - 1
        places = distinct(count, free, self.tokens, random).sort(1).values
        tokens = integers(self.vocabulary, (count, self.tokens), random)
        inputs.scatter_(1, places, tokens)
        inputs[:, free] = mark
        return labelled_last(inputs, tokens)

    def solve(self, inputs: Tensor) -> Tensor:
        """Collect the tokens before the mark that are not blank."""
        before = inputs[:, : self.length - self.tokens - 1]
        tokens = before[before < self.vocabulary].reshape(-1, self.tokens)
        unasked = torch.zeros(len(inputs), self.length - self.tokens, dtype=torch.long)
        return chosen(torch.cat([unasked, tokens], 1), self.outputs)
