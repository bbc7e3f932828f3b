"""Items as vectors, for tasks whose inputs are features.

An item has a direction (``dim`` numbers), a label (one of ``labels``) and a mark; marks are for tokens that
are no items, such as the question. Directions are larger than labels, since they are compared and labels only
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from unsoft.lab.tasks.task import Task

_DIRECTION, _LABEL, _MARK = 4.0, 2.0, 2.0


def items(directions: Tensor, values: Tensor, labels: int, marks: int) -> Tensor:
    """Return items (batch, n, dim + labels + marks) with directions (batch, n, dim) and labels (batch, n)."""
    unmarked = torch.zeros(*values.shape, marks)
    return torch.cat([directions * _DIRECTION, one_hot(values, labels) * _LABEL, unmarked], -1)


def question(directions: Tensor, labels: int, marks: int, mark: int = -1) -> Tensor:
    """Return tokens of the same shape without a label and with a mark."""
    unlabelled = torch.zeros(*directions.shape[:-1], labels)
    marked = torch.zeros(*directions.shape[:-1], marks)
    marked[..., mark] = _MARK
    return torch.cat([directions * _DIRECTION, unlabelled, marked], -1)


def pointing(inputs: Tensor, dim: int) -> Tensor:
    """Return the directions of tokens, scaled to length 1 (0 where there is none)."""
    return torch.nn.functional.normalize(inputs[..., :dim], dim=-1)


def saying(inputs: Tensor, dim: int, labels: int) -> Tensor:
    """Return the labels of items, (batch, n)."""
    return inputs[..., dim : dim + labels].argmax(-1)


@dataclass(frozen=True, kw_only=True)
class Lookup(Task):
    """Base of tasks that ask for the label of one item."""

    kind: ClassVar[str] = "features"

    labels: int = 8
    """Number of labels."""
    noise: float = 0.1
    """Noise between the directions of an item and its question."""
    dim: int = 16
    """Dimensions of a direction."""

    @property
    def size(self) -> int:
        return self.dim + self.labels + 1

    @property
    def outputs(self) -> int:
        return self.labels
