"""Text: language modelling, by bytes or by tokens of several bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.corpus import BYTES, Encoded, corpus, encode
from unsoft.lab.tasks.draw import integers
from unsoft.lab.tasks.task import Batch, Setup, Task, asked, register

_LARGEST = 4096
"""Most tokens of byte-pair encoding: the known solution counts pairs of them."""


@register
@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """The next byte or token of a text. Training, validation and test draw windows from different documents.

    path
        A file, or a folder whose files are the documents; without it the text that comes with Python.
    level
        "bytes", or "bpe": byte-pair encoding that is learned from the training text. The score of both is in
        bits per byte, so they can be compared.
    """

    name: ClassVar[str] = "text"
    tells: ClassVar[str] = "what mechanisms are worth on real text, at equal size and steps"
    metric: ClassVar[str] = "bits per byte"
    higher_is_better: ClassVar[bool] = False
    difficulty: ClassVar[str] = "length"
    setup: ClassVar[Setup] = Setup(layers=2, width=64, heads=4, steps=500, batch=16, positions=True)
    answers_in_tokens: ClassVar[bool] = True

    length: int = 128
    path: str = ""
    level: str = "bytes"
    vocabulary: int = 512
    """Tokens of the level "bpe"; 256 of them are the bytes."""

    def __post_init__(self) -> None:
        self.at_least(1, "length")
        self.one_of("level", "bytes", "bpe")
        self.at_least(BYTES, "vocabulary")
        self.require(
            self.vocabulary <= _LARGEST, f"'vocabulary' must be at most {_LARGEST}, not {self.vocabulary}"
        )
        if not isinstance(self.path, str):
            raise TypeError(f"text: 'path' must be text, not {self.path!r}")
        for part, content in zip(("training", "validation", "test"), self._parts, strict=True):
            self.require(
                len(content) > self.length,
                f"'length' must be less than the {len(content)} {self._unit} of the {part} text,"
                f" not {self.length}",
            )

    @property
    def _encoded(self) -> Encoded | None:
        return encode(self.path, self.vocabulary) if self.level == "bpe" else None

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        """Texts of training, validation and test as token numbers."""
        encoded = self._encoded
        return corpus(self.path, validation=True) if encoded is None else encoded[:3]

    @property
    def _unit(self) -> str:
        return "bytes" if self.level == "bytes" else "tokens"

    @property
    def _bytes_each(self) -> float:
        """Mean bytes per token of the test text."""
        encoded = self._encoded
        return 1.0 if encoded is None else encoded.bytes_per_token

    @property
    def size(self) -> int:
        return BYTES if self.level == "bytes" else self.vocabulary

    @property
    def chance(self) -> float:
        return math.log2(self.size) / self._bytes_each

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        return torch.zeros(*labels.shape, self.size)

    def difficulties(self) -> tuple[int, ...]:
        shortest = min(map(len, self._parts))
        return tuple(length for length in (self.length, 4 * self.length) if length < shortest)

    def files(self) -> Mapping[str, str]:
        encoded = self._encoded
        return {} if encoded is None else {"tokenizer.json": encoded.tokenizer}

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
        nats = torch.nn.functional.cross_entropy(answers.float(), targets, reduction="none")
        return nats / (math.log(2) * self._bytes_each)

    def solve(self, inputs: Tensor) -> Tensor:
        """Return log-probabilities of an n-gram model of the training text: three bytes, or two tokens,
        smoothed with shorter ones (Witten and Bell 1991)."""
        size = self.size
        before = torch.nn.functional.pad(inputs, (1, 0), value=ord("\n"))[:, :-1]
        contexts = (None, inputs, before * size + inputs)
        likely = torch.full((size,), 1 / size)
        counted = _counts(replace(self, length=1))
        # Witten and Bell: a context seen N times with K different continuations reserves K / (N + K) of its
        # probability for the shorter context. One that was never seen leaves all of it (K = N = 0).
        for counts, context in zip(counted, contexts[: len(counted)], strict=True):
            seen = counts.reshape(-1, size)[0 if context is None else context].float()
            kinds = (seen > 0).sum(-1, keepdim=True)
            mixed = (seen + kinds * likely) / (seen.sum(-1, keepdim=True) + kinds).clamp(min=1)
            likely = mixed + likely * (kinds == 0)
        return likely.log()


@lru_cache(maxsize=1)
def _counts(task: TextTask) -> list[Tensor]:
    """Return the counts of bytes, pairs and triples in the training text, or of tokens and pairs."""
    content, size = task._parts[0].long(), task.size
    counts, numbers = [torch.bincount(content, minlength=size)], content
    for order in (2, 3) if task.level == "bytes" else (2,):
        numbers = numbers[:-1] * size + content[order - 1 :]
        counts.append(torch.bincount(numbers, minlength=size**order).to(torch.int32))
    return counts
