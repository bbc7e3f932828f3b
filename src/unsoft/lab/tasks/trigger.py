"""Trigger: do nothing unless a trigger occurs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import integers, normal
from unsoft.lab.tasks.task import IGNORE, Batch, Setup, Task, register

_START, _TRIGGER, _CONTENT = range(3)  # the mark of a token; the last dimensions of the inputs
_MARKS = 3
_MARK = 2.0


@register
@dataclass(frozen=True, kw_only=True)
class Trigger(Task):
    """Return the mean of all content before the trigger at the trigger, and zero at every other token.

    Labels are vectors, (batch, length, dim). The score is the squared error over that of always giving zero:
    1 is doing nothing, 0 is perfect. Content is drawn around a centre that differs from sequence to sequence.
    Each token carries a mark: start, trigger or content. Without the last, rectified attention has no
    constant by which all content could weigh the same, and cannot take a mean.
    """

    name: ClassVar[str] = "trigger"
    tells: ClassVar[str] = "attending to nothing until a trigger appears"
    source: ClassVar[str] = "Ran-Milo 2026 (arXiv 2603.11487)"
    kind: ClassVar[str] = "features"
    metric: ClassVar[str] = "relative error"
    higher_is_better: ClassVar[bool] = False
    difficulty: ClassVar[str] = "length"
    setup: ClassVar[Setup] = Setup(steps=400)
    choices: ClassVar[range] = range(0)
    chance: ClassVar[float] = 1.0

    length: int = 32
    """Tokens after the start token; one of them is the trigger."""
    dim: int = 8
    noise: float = 1.0
    """Standard deviation of the content around its centre; the centre has 1 in each dimension."""
    start: bool = True
    """Begin with a token without content, on which a sink costs nothing."""

    def __post_init__(self) -> None:
        self.at_least(2, "length")
        self.at_least(1, "dim")
        self.between(0, 10, "noise")

    def difficulties(self) -> tuple[int, ...]:
        return self.length, 4 * self.length, 16 * self.length

    @property
    def size(self) -> int:
        return self.dim + _MARKS

    @property
    def outputs(self) -> int:
        return self.dim

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        return torch.zeros(labels.shape)

    @property
    def _energy(self) -> float:
        """Expected squared length of a label: the trigger is one of ``length`` tokens, after 1 to length -
        1 others.
        """
        # A mean of n draws has variance noise^2 / n around a centre whose variance is 1 in each dimension.
        before = range(1, self.length)
        return self.dim * (1 + self.noise**2 * sum(1 / n for n in before) / len(before)) / self.length

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        centre = normal((count, 1, self.dim), random)
        content = centre + self.noise * normal((count, self.length, self.dim), random)
        at = integers(self.length - 1, (count,), random) + 1
        rows = torch.arange(count)
        target = torch.zeros_like(content)
        before = (torch.arange(self.length) < at[:, None]).float()[..., None]
        target[rows, at] = (content * before).sum(1) / at[:, None]
        content[rows, at] = 0
        kind = torch.full((count, self.length + 1), _CONTENT)
        kind[:, 0], kind[rows, at + 1] = _START, _TRIGGER
        marks = _MARK * torch.nn.functional.one_hot(kind, _MARKS)
        inputs = torch.cat([torch.nn.functional.pad(content, (0, 0, 1, 0)), marks], -1)
        labels = torch.cat([torch.full((count, 1, self.dim), float(IGNORE)), target], 1)
        return Batch(inputs, labels) if self.start else Batch(inputs[:, 1:], labels[:, 1:])

    def solve(self, inputs: Tensor) -> Tensor:
        """Return the running mean of the content at the trigger."""
        content, marks = inputs[..., : self.dim], inputs[..., self.dim :]
        is_content = (marks[..., _CONTENT, None] > 0).float()
        mean = (content * is_content).cumsum(1) / is_content.cumsum(1).clamp(min=1)
        return mean * (marks[..., _TRIGGER, None] > 0)

    def at_rest(self, labels: Tensor) -> Tensor:
        """Return all positions but the trigger and the start, which has no label."""
        return (labels == 0).all(-1)

    def grade(self, outputs: Tensor, labels: Tensor) -> Tensor:
        is_asked = (labels != IGNORE).all(-1)
        error = outputs.float()[is_asked] - labels[is_asked]
        return error.square().sum(-1) / self._energy

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.grade(outputs, labels).mean()
