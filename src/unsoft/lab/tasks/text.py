"""Text: language modelling by bytes. :mod:`unsoft.lab.tasks.language` has tokens and packed documents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.corpus import BYTES, corpus
from unsoft.lab.tasks.draw import integers
from unsoft.lab.tasks.task import Batch, Setup, Task, asked, register


@register
@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """The next byte of a text. Training, validation and test draw windows from different documents.

    path
        A file, or a folder whose files are the documents; without it the text that comes with Python.
    """

    name: ClassVar[str] = "text"
    tells: ClassVar[str] = "predicting real text at equal size and steps"
    metric: ClassVar[str] = "bits per byte"
    higher_is_better: ClassVar[bool] = False
    difficulty: ClassVar[str] = "length"
    setup: ClassVar[Setup] = Setup(layers=2, width=64, heads=4, steps=500, batch=16, positions=True)
    answers_in_tokens: ClassVar[bool] = True
    size: ClassVar[int] = BYTES
    chance: ClassVar[float] = math.log2(BYTES)

    length: int = 128
    path: str = ""

    def __post_init__(self) -> None:
        self.at_least(1, "length")
        if not isinstance(self.path, str):
            raise TypeError(f"text: 'path' must be text, not {self.path!r}")
        for part, content in zip(("training", "validation", "test"), self._parts, strict=True):
            self.require(
                len(content) > self.length,
                f"'length' must be less than the {len(content)} bytes of the {part} text, not {self.length}",
            )

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        """Texts of training, validation and test."""
        return corpus(self.path, validation=True)

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        return torch.zeros(*labels.shape, BYTES)

    def difficulties(self) -> tuple[int, ...]:
        shortest = min(map(len, self._parts))
        return tuple(length for length in (self.length, 4 * self.length) if length < shortest)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        return self._windows(self._parts[0 if training else 2], count, random)

    def draw_validation(self, count: int, random: torch.Generator) -> Batch:
        return self._windows(self._parts[1], count, random)

    def _windows(self, content: Tensor, count: int, random: torch.Generator) -> Batch:
        start = integers(len(content) - self.length, (count, 1), random)
        window = content[start + torch.arange(self.length + 1)].long()
        return Batch(window[:, :-1], window[:, 1:])

    def grade(self, outputs: Tensor, labels: Tensor) -> Tensor:
        answers, targets = asked(outputs, labels)
        return torch.nn.functional.cross_entropy(answers.float(), targets, reduction="none") / math.log(2)

    def solve(self, inputs: Tensor) -> Tensor:
        """Return log-probabilities of triples of bytes of the training text, smoothed with shorter ones
        (Witten and Bell 1991)."""
        before = torch.nn.functional.pad(inputs, (1, 0), value=ord("\n"))[:, :-1]
        likely = torch.full((BYTES,), 1 / BYTES)
        # Witten and Bell: a context seen N times with K different continuations reserves K / (N + K) of its
        # probability for the shorter context. One that was never seen leaves all of it (K = N = 0).
        contexts = (torch.tensor(0), inputs, before * BYTES + inputs)
        for counts, context in zip(_counts(self.path), contexts, strict=True):
            seen = counts.reshape(-1, BYTES)[context].float()
            kinds = (seen > 0).sum(-1, keepdim=True)
            mixed = (seen + kinds * likely) / (seen.sum(-1, keepdim=True) + kinds).clamp(min=1)
            likely = mixed + likely * (kinds == 0)
        return likely.log()


@lru_cache(maxsize=1)
def _counts(path: str) -> list[Tensor]:
    """Return the counts of bytes, pairs and triples in the training text."""
    content = corpus(path, validation=True)[0].long()
    counts, numbers = [torch.bincount(content, minlength=BYTES)], content
    for order in (2, 3):
        numbers = numbers[:-1] * BYTES + content[order - 1 :]
        counts.append(torch.bincount(numbers, minlength=BYTES**order).to(torch.int32))
    return counts
