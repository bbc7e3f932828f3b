"""In-context recall, the first of the MAD tasks, with and without noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from unsoft.lab.tasks.draw import integers
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import IGNORE, Batch, Retelling, Setup, chosen

MAD = "Poli et al. 2024, Mechanistic design (arXiv 2403.17844)"


@register
@dataclass(frozen=True, kw_only=True)
class InContextRecall(Retelling):
    """Key, value, key, value, ...: a key has the same value throughout a sequence,
    and is asked whenever it comes again."""

    name: ClassVar[str] = "in-context-recall"
    tells: ClassVar[str] = (
        "mechanisms that look a key up among repetitions of few from those that average values"
    )
    source: ClassVar[str] = MAD

    length: int = 32
    keys: int = 4
    values: int = 16
    noise: float = 0.0
    """Share of pairs that are replaced by random tokens."""
    noise_tokens: int = 16

    def __post_init__(self) -> None:
        self.at_least(4, "length")
        self.at_least(1, "keys", "noise_tokens")
        self.at_least(2, "values")
        self.between(0, 0.9, "noise")
        self.require(self.length % 2 == 0, f"'length' must be even, not {self.length}")

    @property
    def setup(self) -> Setup:
        # Four keys, each of which comes often: eight are not learned in 1,000 steps.
        return Setup(layers=2, steps=400, positions=True)

    @property
    def size(self) -> int:
        return self.keys + self.values + self.noise_tokens

    @property
    def choices(self) -> range:
        return range(self.keys, self.keys + self.values)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        pairs = self.length // 2
        meaning = integers(self.values, (count, self.keys), random) + self.keys
        keys = integers(self.keys, (count, pairs), random)
        noisy = torch.rand(count, pairs, generator=random) < self.noise
        # One pair before the last is no noise, and the last asks for it: every sequence has an answer.
        kept = integers(pairs - 1, (count, 1), random)
        noisy.scatter_(1, kept, False)
        noisy[:, -1] = False
        keys[:, -1:] = keys.gather(1, kept)
        seen = one_hot(keys, self.keys) * ~noisy[..., None]
        before = (seen.cumsum(1) - seen).gather(2, keys[..., None]).squeeze(-1) > 0
        values = meaning.gather(1, keys)
        inputs = torch.stack([keys, values], -1)
        noise = integers(self.noise_tokens, (count, pairs, 2), random) + self.keys + self.values
        inputs = torch.where(noisy[..., None], noise, inputs)
        asked = torch.where(before & ~noisy, values, IGNORE)
        labels = torch.stack([asked, torch.full_like(asked, IGNORE)], -1)
        return Batch(inputs.flatten(1), labels.flatten(1))

    def solve(self, inputs: Tensor) -> Tensor:
        """Take the token that followed the same key."""
        keys, values = inputs[:, 0::2], inputs[:, 1::2]
        earlier = torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool).tril(-1)
        first = ((keys[:, :, None] == keys[:, None]) & earlier).long().argmax(-1)
        recalled = values.gather(1, first)
        return chosen(recalled.repeat_interleave(2, 1), self.outputs)


@register
@dataclass(frozen=True, kw_only=True)
class NoisyRecall(InContextRecall):
    """In-context recall of which a share is noise."""

    name: ClassVar[str] = "noisy-recall"
    tells: ClassVar[str] = "mechanisms that ignore what is irrelevant from those that are diluted by it"

    noise: float = 0.2
    noise_tokens: int = 4
    """With sixteen of them the task is not learned in 800 steps."""

    @property
    def setup(self) -> Setup:
        return replace(super().setup, steps=600)
