"""Memorisation: facts that are in no context and must be stored in the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import generator, integers
from unsoft.lab.tasks.in_context_recall import MAD
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import IGNORE, Batch, Setup, Task, chosen


@register
@dataclass(frozen=True, kw_only=True)
class Memorisation(Task):
    """Key, blank, key, blank, ...: at each blank give the value of the key before it,
    which is the same in every sequence ever drawn.

    Facts are those of training, since there is nothing else to be known:
    the control in which the mechanism should not matter.
    """

    name: ClassVar[str] = "memorisation"
    tells: ClassVar[str] = "what the weights hold from what attention holds: mechanisms should not differ"
    source: ClassVar[str] = MAD

    length: int = 16
    keys: int = 64
    values: int = 64
    facts: int = 0
    """The seed of the facts."""

    def __post_init__(self) -> None:
        self.at_least(2, "length", "values")
        self.at_least(1, "keys")
        self.require(self.length % 2 == 0, f"'length' must be even, not {self.length}")

    @property
    def setup(self) -> Setup:
        return Setup(layers=2, steps=300, positions=True)

    @property
    def size(self) -> int:
        return self.keys + 1

    @property
    def outputs(self) -> int:
        return self.values

    def _values(self) -> Tensor:
        return integers(self.values, (self.keys,), generator(self.facts, "facts"))

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        keys = integers(self.keys, (count, self.length // 2), random)
        inputs = torch.stack([keys, torch.full_like(keys, self.keys)], -1)
        labels = torch.stack([torch.full_like(keys, IGNORE), self._values()[keys]], -1)
        return Batch(inputs.flatten(1), labels.flatten(1))

    def solve(self, inputs: Tensor) -> Tensor:
        """Look the facts up."""
        values = self._values()[inputs[:, 0::2]]
        return chosen(values.repeat_interleave(2, 1), self.outputs)
