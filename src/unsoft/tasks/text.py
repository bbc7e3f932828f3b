"""Text: language modelling, byte by byte."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.tasks.corpus import corpus
from unsoft.tasks.draw import integers
from unsoft.tasks.registry import register
from unsoft.tasks.task import Batch, Setup, Task, asked

_BYTES = 256


@register
@dataclass(frozen=True, kw_only=True)
class Text(Task):
    """The next byte of a text. Windows are drawn from documents for training, and others for the test.

    path
        A file, or a folder whose files are the documents; without it the text that comes with Python.
    """

    name: ClassVar[str] = "text"
    tells: ClassVar[str] = "what mechanisms are worth on real text, at equal size and steps"
    metric: ClassVar[str] = "bits per byte"
    higher_is_better: ClassVar[bool] = False

    length: int = 128
    path: str = ""

    def __post_init__(self) -> None:
        self.at_least(1, "length")
        if not isinstance(self.path, str):
            raise TypeError(f"text: 'path' must be text, not {self.path!r}")
        for part, content in zip(("training", "test"), corpus(self.path), strict=True):
            self.require(
                len(content) > self.length,
                f"'length' must be less than the {len(content)} bytes of the {part} text, not {self.length}",
            )

    @property
    def setup(self) -> Setup:
        return Setup(layers=2, width=64, heads=4, steps=2000, batch=16, positions=True)

    @property
    def size(self) -> int:
        return _BYTES

    @property
    def outputs(self) -> int:
        return _BYTES

    @property
    def answers_in_tokens(self) -> bool:
        return True

    @property
    def choices(self) -> range:
        return range(_BYTES)

    @property
    def chance(self) -> float:
        return math.log2(_BYTES)

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        return torch.zeros(*labels.shape, _BYTES)

    def harder(self) -> tuple[Task, ...]:
        longer = self.length * 4
        return (
            (replace(self, length=longer),) if all(len(part) > longer for part in corpus(self.path)) else ()
        )

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        content = corpus(self.path)[0 if training else 1]
        start = integers(len(content) - self.length, (count, 1), random)
        window = content[start + torch.arange(self.length + 1)].long()
        return Batch(window[:, :-1], window[:, 1:])

    def grade(self, outputs: Tensor, labels: Tensor) -> Tensor:
        found, wanted = asked(outputs, labels)
        return torch.nn.functional.cross_entropy(found.float(), wanted, reduction="none") / math.log(2)

    def solve(self, inputs: Tensor) -> Tensor:
        """Counts of three bytes in the training text, mixed with those of two and one (Witten and Bell 1991);
        as logarithms."""
        before = torch.nn.functional.pad(inputs, (1, 0), value=ord("\n"))[:, :-1]
        likely = torch.full((_BYTES,), 1 / _BYTES)
        for counts, context in zip(_counts(self.path), (None, inputs, before * _BYTES + inputs), strict=True):
            seen = counts.reshape(-1, _BYTES)[0 if context is None else context].float()
            kinds = (seen > 0).sum(-1, keepdim=True)
            likely = (seen + kinds * likely) / (seen.sum(-1, keepdim=True) + kinds).clamp(min=1) + likely * (
                kinds == 0
            )
        return likely.log()


@lru_cache(maxsize=1)
def _counts(path: str) -> tuple[Tensor, Tensor, Tensor]:
    """How often each byte, pair and triple occurs in the training text."""
    content = corpus(path)[0].long()
    pairs = content[:-1] * _BYTES + content[1:]
    triples = pairs[:-1] * _BYTES + content[2:]
    sizes = (_BYTES, _BYTES**2, _BYTES**3)
    one, two, three = (
        torch.bincount(numbers, minlength=size).to(torch.int32)
        for numbers, size in zip((content, pairs, triples), sizes, strict=True)
    )
    return one, two, three
