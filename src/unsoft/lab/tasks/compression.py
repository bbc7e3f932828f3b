"""Compression: a whole sequence in one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import integers
from unsoft.lab.tasks.in_context_recall import MAD
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import IGNORE, Batch, MarkedTokens, Setup, chosen


@register
@dataclass(frozen=True, kw_only=True)
class Compression(MarkedTokens):
    """Random tokens and a mark; all tokens are read from the output of the mark, so labels are (batch,
    length, tokens).

    MAD reads them with an MLP that knows the position; here it is the last linear map of the model.
    """

    name: ClassVar[str] = "compression"
    tells: ClassVar[str] = "mechanisms that gather a sequence into one token without mixing it up"
    source: ClassVar[str] = MAD

    length: int = 6
    """Tokens before the mark."""

    @property
    def setup(self) -> Setup:
        return Setup(layers=2, heads=4, steps=1000, positions=True)

    @property
    def outputs(self) -> int:
        return self.length * self.vocabulary

    @property
    def choices(self) -> range:
        return range(self.vocabulary)

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        return chosen(integers(self.vocabulary, tuple(labels.shape), random), self.vocabulary).flatten(-2)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        tokens = integers(self.vocabulary, (count, self.length), random)
        inputs = torch.cat([tokens, torch.full((count, 1), self.vocabulary)], 1)
        labels = torch.full((count, self.length + 1, self.length), IGNORE)
        labels[:, -1] = tokens
        return Batch(inputs, labels)

    def solve(self, inputs: Tensor) -> Tensor:
        """Return every token at its position."""
        read = chosen(inputs[:, :-1], self.vocabulary).flatten(1)
        return read[:, None].expand(-1, inputs.shape[1], -1)
