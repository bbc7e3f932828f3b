"""Items as vectors: where it points, what it says, and marks. Shared by the tasks whose inputs are features.

An item has a direction (``dim`` numbers), a label (one of ``labels``) and a mark; marks are for tokens that
are no items, such as the question. Directions are larger than labels, since they have to be compared and
labels only read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from unsoft.lab.tasks.task import Task

_DIRECTION, _LABEL, _MARK = 4.0, 2.0, 2.0


def items(directions: Tensor, said: Tensor, labels: int, marks: int) -> Tensor:
    """(batch, n, dim + labels + marks) from directions (batch, n, dim) and what they say (batch, n)."""
    unmarked = torch.zeros(*said.shape, marks)
    return torch.cat([directions * _DIRECTION, one_hot(said, labels) * _LABEL, unmarked], -1)


def question(directions: Tensor, labels: int, marks: int, mark: int = -1) -> Tensor:
    """The same shape for tokens that say nothing and carry a mark."""
    silent = torch.zeros(*directions.shape[:-1], labels)
    marked = torch.zeros(*directions.shape[:-1], marks)
    marked[..., mark] = _MARK
    return torch.cat([directions * _DIRECTION, silent, marked], -1)


def pointing(inputs: Tensor, dim: int) -> Tensor:
    """The directions of tokens, of length 1 (0 where there is none)."""
    return torch.nn.functional.normalize(inputs[..., :dim], dim=-1)


def saying(inputs: Tensor, dim: int, labels: int) -> Tensor:
    """What items say, (batch, n)."""
    return inputs[..., dim : dim + labels].argmax(-1)


@dataclass(frozen=True, kw_only=True)
class Lookup(Task):
    """The base of tasks whose questions ask what one of the items says."""

    kind: ClassVar[str] = "features"

    labels: int = 8
    """Things that an item can say."""
    noise: float = 0.1
    """Between where an item and its question point."""
    dim: int = 16
    """Of directions."""

    @property
    def size(self) -> int:
        return self.dim + self.labels + 1

    @property
    def outputs(self) -> int:
        return self.labels
