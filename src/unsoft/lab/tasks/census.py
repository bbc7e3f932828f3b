"""Census: every source has one vote, however often it is repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import blurred, directions, integers, one_integer, shuffled, take
from unsoft.lab.tasks.evidence import items, pointing, question, saying
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import Batch, Setup, Task, chosen, labelled_last

_SAME = 0.8  # the cosine above which two items come from one source


@register
@dataclass(frozen=True, kw_only=True)
class Census(Task):
    """Return the majority vote of the sources.

    Items are noisy copies of their source; some sources are copied much more often.
    """

    name: ClassVar[str] = "census"
    tells: ClassVar[str] = "mechanisms that count units of information from those that count copies"
    kind: ClassVar[str] = "features"
    difficulty: ClassVar[str] = "repeats"

    sources: int = 5
    repeats: int = 8
    """A source has (repeats + 1) / 2 copies on average.

    While training it is 1 to ``repeats``, in the test exactly ``repeats``.
    """
    noise: float = 0.1
    dim: int = 16

    def __post_init__(self) -> None:
        self.at_least(3, "sources")
        self.at_least(1, "repeats")
        self.at_least(2, "dim")
        self.between(0, 0.3, "noise")
        self.require(
            self.sources % 2 == 1, f"'sources' must be odd, so that there is a majority, not {self.sources}"
        )

    @property
    def setup(self) -> Setup:
        return Setup(steps=600)

    @property
    def size(self) -> int:
        return self.dim + 2 + 2

    @property
    def outputs(self) -> int:
        return 2

    def difficulties(self) -> tuple[int, ...]:
        own = self.repeats
        return tuple(sorted({1, max(own // 4, 1), max(own // 2, 1), own, 2 * own, 8 * own}))

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        repeats = one_integer(1, self.repeats, random) if training else self.repeats
        length = self.sources * (repeats + 1) // 2
        centres = directions((count, self.sources, self.dim), random)
        votes = integers(2, (count, self.sources), random)
        # One copy of each, the others by weights so uneven that copies often outvote sources.
        weights = torch.rand(count, self.sources, generator=random) ** 3 + 1e-3
        more = torch.multinomial(weights, max(length - self.sources, 1), replacement=True, generator=random)
        which = torch.cat([torch.arange(self.sources).expand(count, -1), more[:, : length - self.sources]], 1)
        copies = items(blurred(take(centres, which), self.noise, random), take(votes, which), 2, 2)
        nowhere = torch.zeros(count, 1, self.dim)
        inputs = torch.cat([question(nowhere, 2, 2, 0), shuffled(copies, random), question(nowhere, 2, 2)], 1)
        return labelled_last(inputs, (votes.sum(1, keepdim=True) * 2 > self.sources).long())

    def solve(self, inputs: Tensor) -> Tensor:
        """Weigh every item by 1 / the number of items with its direction."""
        return self._count(inputs, by_source=True)

    def shortcut(self, inputs: Tensor) -> Tensor:
        """Count copies, like a mechanism that cannot compare keys with each other."""
        return self._count(inputs, by_source=False)

    def _count(self, inputs: Tensor, by_source: bool) -> Tensor:
        copies = inputs[:, 1:-1]
        direction = pointing(copies, self.dim)
        alike = (direction @ direction.mT > _SAME).float()
        weight = 1 / alike.sum(-1) if by_source else torch.ones(copies.shape[:2])
        yes = (weight * saying(copies, self.dim, 2)).sum(-1) * 2 > weight.sum(-1)
        return chosen(yes.long()[:, None].expand(-1, inputs.shape[1]), 2)
