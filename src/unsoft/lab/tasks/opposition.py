"""Opposition: classify each question as supported, opposed or neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import across_from, blurred, directions, integers, shuffled
from unsoft.lab.tasks.evidence import Lookup, items, question, saying
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import Batch, Setup, chosen, labelled_last

FOR, AGAINST, NEITHER = range(3)
_CLEAR = 0.5  # the cosine from which an item is evidence


@register
@dataclass(frozen=True, kw_only=True)
class Opposition(Lookup):
    """One item may point where the question points, or exactly against it; all others point across it.

    Answers: the label of the item that supports (0 to labels - 1),
    of the one that opposes (labels to 2 labels - 1), or 2 labels: neither.
    """

    name: ClassVar[str] = "opposition"
    tells: ClassVar[str] = "one head with signed weights from one head that can only support"

    irrelevant: int = 15
    labels: int = 4

    def __post_init__(self) -> None:
        self.at_least(1, "irrelevant")
        self.at_least(1, "labels")
        self.at_least(3, "dim")
        self.between(0, 1, "noise")

    @property
    def setup(self) -> Setup:
        return Setup(steps=400, batch=128)

    @property
    def outputs(self) -> int:
        return 2 * self.labels + 1

    @property
    def chance(self) -> float:
        return 1 / 3  # always "neither"

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        return chosen(torch.full_like(labels, 2 * self.labels), self.outputs)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        asked = directions((count, 1, self.dim), random)
        case = integers(3, (count, 1), random)
        where = across_from(asked, directions((count, self.irrelevant + 1, self.dim), random))
        sign = torch.tensor([1.0, -1.0, 0.0])[case][..., None]
        where[:, :1] = torch.where(sign == 0, where[:, :1], sign * asked)
        values = integers(self.labels, (count, self.irrelevant + 1), random)
        first = values[:, :1]
        answer = torch.where(
            case == FOR, first, torch.where(case == AGAINST, self.labels + first, 2 * self.labels)
        )
        evidence = shuffled(items(blurred(where, self.noise, random), values, self.labels, 1), random)
        return labelled_last(torch.cat([evidence, question(asked, self.labels, 1)], 1), answer)

    def _cosines(self, inputs: Tensor) -> Tensor:
        directions = torch.nn.functional.normalize(inputs[..., : self.dim], dim=-1)
        return (directions[:, :-1] @ directions[:, -1:].mT).squeeze(-1)

    def _answer(self, inputs: Tensor, sees_opposition: bool) -> Tensor:
        cosine = self._cosines(inputs)
        size = cosine.abs() if sees_opposition else cosine
        strongest = size.argmax(-1, keepdim=True)
        values = saying(inputs, self.dim, self.labels).gather(1, strongest)
        signed = cosine.gather(1, strongest)
        answer = torch.where(
            signed > _CLEAR, values, torch.where(signed < -_CLEAR, self.labels + values, 2 * self.labels)
        )
        return chosen(answer.expand(-1, inputs.shape[1]), self.outputs)

    def solve(self, inputs: Tensor) -> Tensor:
        """Take the item with the largest absolute cosine to the question."""
        return self._answer(inputs, sees_opposition=True)

    def shortcut(self, inputs: Tensor) -> Tensor:
        """See support only, like one head with non-negative weights: opposition looks like neither."""
        return self._answer(inputs, sees_opposition=False)
