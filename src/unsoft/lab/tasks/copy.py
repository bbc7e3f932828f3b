"""Copy: repeat a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import integers, one_integer
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import Batch, MarkedTokens, Retelling, Setup, chosen, labelled_last


@register
@dataclass(frozen=True, kw_only=True)
class Copy(MarkedTokens, Retelling):
    """Random tokens, a mark, and the same tokens again. Longer sequences in the test than in training."""

    name: ClassVar[str] = "copy"
    tells: ClassVar[str] = (
        "mechanisms that keep a sequence apart by its positions, also at lengths not seen in training"
    )

    difficulty: ClassVar[str] = "length"

    length: int = 8
    """Tokens to copy: 1 to ``length`` while training, exactly ``length`` in the test."""

    @property
    def setup(self) -> Setup:
        # Four heads: with one or two, copies are still wrong in places after as many steps.
        return Setup(layers=2, heads=4, steps=1500, positions=True)

    @property
    def outputs(self) -> int:
        return self.vocabulary

    def difficulties(self) -> tuple[int, ...]:
        return tuple(sorted({max(self.length // 2, 1), self.length, 2 * self.length, 4 * self.length}))

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        length = one_integer(1, self.length, random) if training else self.length
        tokens = integers(self.vocabulary, (count, length), random)
        mark = torch.full((count, 1), self.vocabulary)
        return labelled_last(torch.cat([tokens, mark, tokens[:, :-1]], 1), tokens)

    def solve(self, inputs: Tensor) -> Tensor:
        """Return the token half a sequence earlier."""
        return chosen(inputs.roll(inputs.shape[1] // 2, 1).clamp(max=self.vocabulary - 1), self.outputs)
