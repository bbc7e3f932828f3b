"""Recall: look up the values of keys that were given as pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import distinct, integers, take
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import IGNORE, Batch, Setup, Task, chosen, labelled_last


@register
@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Multi-query associative recall.

    form
        "stream", as in zoology: key and value are two tokens, so a model needs two layers; then ``pairs`` of
        the remaining places ask for a key, nearer ones more often by a power law, and random tokens fill the
        rest. "joined": each pair is one token, which one layer can answer.
    power
        1: questions are spread evenly; towards 0: soon after the pairs.
    """

    name: ClassVar[str] = "recall"
    tells: ClassVar[str] = "mechanisms that find one key among many from those that blur them"
    source: ClassVar[str] = "Arora, Eyuboglu et al. 2023, Zoology (arXiv 2312.04927)"

    form: str = "stream"
    pairs: int = 4
    length: int = 16
    """Length of the stream; the joined form has one token for each pair and one for each question."""
    keys: int = 16
    values: int = 16
    power: float = 0.01

    def __post_init__(self) -> None:
        self.one_of("form", "stream", "joined")
        self.at_least(1, "pairs", "length", "keys")
        self.at_least(2, "values")
        self.between(0, 1, "power")
        self.require(self.power > 0, "'power' must be more than 0")
        self.require(
            self.pairs <= self.keys, f"{self.pairs} pairs need as many keys, and there are {self.keys}"
        )
        if self.form == "stream":
            self.require(
                self.pairs <= self.values,
                f"{self.pairs} pairs need as many values, and there are {self.values}",
            )
            self.require(self.length % 2 == 0, f"'length' must be even, not {self.length}")
            self.require(
                4 * self.pairs <= self.length,
                f"{self.pairs} pairs and their questions need a length of at least {4 * self.pairs}, not"
                f" {self.length}",
            )

    @property
    def setup(self) -> Setup:
        if self.form == "joined":
            return Setup(steps=400)
        # One head and no higher rate: with two, or with 0.006, the two layers find each other late or never.
        return Setup(layers=2, steps=500, positions=True)

    @property
    def size(self) -> int:
        if self.form == "joined":
            return self.keys * self.values + self.keys
        return self.keys + self.values

    @property
    def outputs(self) -> int:
        return self.values if self.form == "joined" else self.size

    @property
    def answers_in_tokens(self) -> bool:
        return self.form == "stream"

    @property
    def choices(self) -> range:
        start = 0 if self.form == "joined" else self.keys
        return range(start, start + self.values)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        keys = distinct(count, self.keys, self.pairs, random)
        if self.form == "joined":
            values = integers(self.values, (count, self.pairs), random)
            order = distinct(count, self.pairs, self.pairs, random)
            asked = self.keys * self.values + take(keys, order)
            return labelled_last(torch.cat([keys * self.values + values, asked], 1), take(values, order))
        return self._stream(keys, self.keys + distinct(count, self.values, self.pairs, random), random)

    def _stream(self, keys: Tensor, values: Tensor, random: torch.Generator) -> Batch:
        count, start = len(keys), 2 * self.pairs
        inputs = integers(self.size, (count, self.length), random)
        inputs[:, 0:start:2], inputs[:, 1:start:2] = keys, values
        places = (self.length - start) // 2
        likely = torch.arange(1, places + 1, dtype=torch.float64) ** (self.power - 1)
        gaps = torch.multinomial(likely.expand(count, -1), self.pairs, generator=random)
        labels = torch.full_like(inputs, IGNORE)
        inputs.scatter_(1, start + 2 * gaps, keys)
        labels.scatter_(1, start + 2 * gaps, values)
        return Batch(inputs, labels)

    def solve(self, inputs: Tensor) -> Tensor:
        """Look every token up among the pairs."""
        if self.form == "joined":
            pairs = inputs[:, : self.pairs]
            keys, values = pairs // self.values, pairs % self.values
            looked_up = inputs - self.keys * self.values
        else:
            keys, values = inputs[:, 0 : 2 * self.pairs : 2], inputs[:, 1 : 2 * self.pairs : 2]
            looked_up = inputs
        same = looked_up[:, :, None] == keys[:, None]
        return chosen(take(values, same.long().argmax(-1)), self.outputs)
