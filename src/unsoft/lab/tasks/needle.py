"""Needle: one relevant key among a crowd of near-duplicates of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import across_from, blurred, directions, integers, one_integer, shuffled
from unsoft.lab.tasks.evidence import Lookup, items, pointing, question, saying
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import Batch, Setup, chosen, labelled_last


@register
@dataclass(frozen=True, kw_only=True)
class Needle(Lookup):
    """Find the label of the item with the direction of the question, among a crowd with a similar direction
    and another label.
    """

    name: ClassVar[str] = "needle"
    tells: ClassVar[str] = "mechanisms that many look-alike keys hijack from those that they do not"
    difficulty: ClassVar[str] = "crowd"

    crowd: int = 8
    """Look-alikes: 1 to ``crowd`` while training, exactly ``crowd`` in the test."""
    similarity: float = 0.9
    """Cosine between the question and the crowd."""
    distractors: int = 4
    """Items that point anywhere."""

    def __post_init__(self) -> None:
        self.at_least(1, "crowd")
        self.at_least(0, "distractors")
        self.at_least(2, "labels", "dim")
        self.between(-1, 0.999, "similarity")
        self.between(0, 2, "noise")

    @property
    def setup(self) -> Setup:
        return Setup(steps=800)

    def difficulties(self) -> tuple[int, ...]:
        few = {1, max(self.crowd // 4, 1)}
        return tuple(sorted({*few, *(self.crowd * factor for factor in (1, 4, 16, 32))}))

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        crowd = one_integer(1, self.crowd, random) if training else self.crowd
        asked = directions((count, 1, self.dim), random)
        across = across_from(asked, directions((count, 1, self.dim), random))
        close = self.similarity * asked + (1 - self.similarity**2) ** 0.5 * across
        where = torch.cat(
            [blurred(asked, self.noise, random), blurred(close.expand(-1, crowd, -1), self.noise, random)], 1
        )
        values = integers(self.labels, (count, 2), random)
        says = torch.cat([values[:, :1], values[:, 1:].expand(-1, crowd)], 1)
        if self.distractors:
            where = torch.cat([where, directions((count, self.distractors, self.dim), random)], 1)
            says = torch.cat([says, integers(self.labels, (count, self.distractors), random)], 1)
        evidence = shuffled(items(where, says, self.labels, 1), random)
        query = question(blurred(asked, self.noise, random), self.labels, 1)
        return labelled_last(torch.cat([evidence, query], 1), values[:, :1])

    def solve(self, inputs: Tensor) -> Tensor:
        """Take the item with the largest cosine to the question."""
        where = pointing(inputs, self.dim)
        nearest = (where[:, :-1] @ where[:, -1:].mT).squeeze(-1).argmax(-1, keepdim=True)
        values = saying(inputs, self.dim, self.labels).gather(1, nearest)
        return chosen(values.expand(-1, inputs.shape[1]), self.labels)
