"""Deletion: find what is left after items were removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import distinct, integers, shuffled, take
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import Batch, Setup, Task, chosen, labelled_last


@register
@dataclass(frozen=True, kw_only=True)
class DeletionTask(Task):
    """Find what is left.

    form
        "sum": items lie on ``places`` lists; the question names two of them: which item is on the first and
        not on the second? Which list is added and which subtracted is known only to the question, so one
        layer needs weights of both signs.
        "stream": each token writes a value to one of ``places``, overwrites what is there, or deletes it; in
        the end every place is asked.
    """

    name: ClassVar[str] = "deletion"
    tells: ClassVar[str] = "weights that can subtract from weights that can only add"

    form: str = "sum"
    places: int = 4
    items: int = 16
    shared: int = 3
    """Items on both lists of the sum."""
    others: int = 8
    """Items on lists that the sum does not ask for."""
    length: int = 32
    """Length of the stream, with its questions."""
    deleted: float = 0.3
    """Share of the stream's tokens that delete."""

    def __post_init__(self) -> None:
        self.one_of("form", "sum", "stream")
        self.at_least(2, "places", "items")
        self.at_least(0, "shared", "others")
        self.between(0, 1, "deleted")
        if self.form == "stream":
            self.at_least(self.places + 1, "length")
        else:
            self.require(
                self.shared + 2 <= self.items,
                f"'shared' must be at most {self.items - 2} with {self.items} items, not {self.shared}",
            )

    @property
    def setup(self) -> Setup:
        if self.form == "stream":
            return Setup(layers=2, heads=2, steps=2000, batch=128, positions=True)
        return Setup(steps=600, batch=128)

    @property
    def size(self) -> int:
        pairs = self.places * self.items
        return pairs + (self.places**2 if self.form == "sum" else 2 * self.places)

    @property
    def outputs(self) -> int:
        return self.items + (self.form == "stream")

    @property
    def chance(self) -> float:
        if self.form == "sum":
            return 1 / self.items
        return max(self._empty, (1 - self._empty) / self.items)

    @property
    def _empty(self) -> float:
        """Probability that nothing is left at a place of the stream."""
        untouched = (1 - 1 / self.places) ** (self.length - self.places)
        return untouched + (1 - untouched) * self.deleted

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        if self.form == "sum":
            return super().guess(labels, random)
        common = self.items if self._empty > (1 - self._empty) / self.items else 0
        return chosen(torch.full_like(labels, common), self.outputs)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        return self._sum(count, random) if self.form == "sum" else self._stream(count, random)

    def _sum(self, count: int, random: torch.Generator) -> Batch:
        lists = distinct(count, self.places, self.places, random)
        plus, minus = lists[:, :1], lists[:, 1:2]
        drawn = distinct(count, self.items, self.shared + 2, random)
        both, left, other = drawn[:, : self.shared], drawn[:, -2:-1], drawn[:, -1:]
        tokens = [
            plus * self.items + torch.cat([both, left], 1),
            minus * self.items + torch.cat([both, other], 1),
        ]
        if self.others and self.places > 2:
            which = integers(self.places - 2, (count, self.others), random) + 2
            tokens.append(
                take(lists, which) * self.items + integers(self.items, (count, self.others), random)
            )
        asked = self.places * self.items + plus * self.places + minus
        return labelled_last(torch.cat([shuffled(torch.cat(tokens, 1), random), asked], 1), left)

    def _stream(self, count: int, random: torch.Generator) -> Batch:
        steps, pairs = self.length - self.places, self.places * self.items
        places = integers(self.places, (count, steps), random)
        values = integers(self.items, (count, steps), random)
        deletes = torch.rand(count, steps, generator=random) < self.deleted
        left = torch.full((count, self.places), self.items)
        for step in range(steps):
            now = torch.where(deletes[:, step], self.items, values[:, step])
            left.scatter_(1, places[:, step : step + 1], now[:, None])
        order = distinct(count, self.places, self.places, random)
        tokens = torch.where(deletes, pairs + places, places * self.items + values)
        return labelled_last(torch.cat([tokens, pairs + self.places + order], 1), take(left, order))

    def solve(self, inputs: Tensor) -> Tensor:
        """The sum: +1 for every item of the first list, -1 for every one of the second.

        The stream: the last token of each place.
        """
        return self._signed_sum(inputs) if self.form == "sum" else self._last(inputs)

    def _signed_sum(self, inputs: Tensor, minus: float = -1.0) -> Tensor:
        asked = inputs[:, -1:] - self.places * self.items
        lists, what = inputs[:, :-1] // self.items, inputs[:, :-1] % self.items
        weight = (lists == asked // self.places).float() + minus * (lists == asked % self.places).float()
        total = torch.zeros(len(inputs), self.items).scatter_add_(1, what, weight)
        return total[:, None].expand(-1, inputs.shape[1], -1)

    def shortcut(self, inputs: Tensor) -> Tensor | None:
        """Read only the first list of the sum, like non-negative weights; None for the stream."""
        return self._signed_sum(inputs, minus=0.0) if self.form == "sum" else None

    def _last(self, inputs: Tensor) -> Tensor:
        pairs, steps = self.places * self.items, self.length - self.places
        tokens, asked = inputs[:, :steps], inputs[:, None, :] - pairs - self.places
        deletes = tokens >= pairs
        touched = torch.where(deletes, tokens - pairs, tokens // self.items)
        value = torch.where(deletes, self.items, tokens % self.items)
        hits = (touched[:, :, None] == asked) * torch.arange(1, steps + 1)[:, None]  # (batch, steps, length)
        last = hits.argmax(1)
        left = torch.where(hits.amax(1) > 0, value.gather(1, last), self.items)
        return chosen(left, self.outputs)
