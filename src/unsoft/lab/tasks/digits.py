"""Digits: scikit-learn's small pictures of handwritten digits, for a vision transformer."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import distinct, generator, integers, normal
from unsoft.lab.tasks.task import Batch, Setup, Task, chosen, register

_SIDE, _CLASSES = 8, 10
_TEST, _VALIDATION, _TRAINING = slice(360), slice(360, 540), slice(540, None)
"""Parts of the shuffled pictures."""


@register
@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """Classify pictures of digits, 8 by 8 pixels from 0 to 1. Of 1797, 360 are kept for the test and 180 for
    validation.

    Needs scikit-learn.

    ``examples`` limits what is seen in training (0: all), ``noise`` is added to all pictures.
    """

    name: ClassVar[str] = "digits"
    tells: ClassVar[str] = "bidirectional attention, on pictures"
    source: ClassVar[str] = "Alpaydin and Kaynak 1998, the digits of scikit-learn"
    kind: ClassVar[str] = "image"
    setup: ClassVar[Setup] = Setup(layers=2, heads=4, steps=300, lr=0.002, batch=64, positions=True)
    size: ClassVar[int] = _SIDE
    outputs: ClassVar[int] = _CLASSES

    patch: int = 2
    noise: float = 0.0
    examples: int = 0

    def __post_init__(self) -> None:
        self.at_least(1, "patch")
        self.at_least(0, "examples")
        self.between(0, 10, "noise")
        self.require(_SIDE % self.patch == 0, f"'patch' must divide the side of 8 pixels, not {self.patch}")

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        return self._drawn(self._training() if training else _part(_TEST), count, random)

    def draw_validation(self, count: int, random: torch.Generator) -> Batch:
        return self._drawn(_part(_VALIDATION), count, random)

    def _drawn(self, part: tuple[Tensor, Tensor], count: int, random: torch.Generator) -> Batch:
        pictures, digits = part
        which = integers(len(digits), (count,), random)
        drawn = pictures[which]
        return Batch(drawn + self.noise * normal(tuple(drawn.shape), random), digits[which])

    def _training(self) -> tuple[Tensor, Tensor]:
        pictures, digits = _part(_TRAINING)
        few = slice(self.examples or None)
        return pictures[few], digits[few]

    def solve(self, inputs: Tensor) -> Tensor:
        """Return the digit of the nearest training picture."""
        pictures, digits = self._training()
        return chosen(digits[torch.cdist(inputs.flatten(1), pictures.flatten(1)).argmin(-1)], _CLASSES)


def _part(which: slice) -> tuple[Tensor, Tensor]:
    pictures, digits = _pictures()
    return pictures[which], digits[which]


@cache
def _pictures() -> tuple[Tensor, Tensor]:
    """Return all pictures and their digits in random order: scikit-learn's order is by writer."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError:
        raise ValueError("digits: the pictures come with scikit-learn; pip install 'unsoft[tasks]'") from None
    loaded = datasets.load_digits()
    order = distinct(1, len(loaded.target), len(loaded.target), generator(0, "digits"))[0]
    pictures = torch.from_numpy(loaded.images).float()[:, None] / 16
    return pictures[order], torch.from_numpy(loaded.target).long()[order]
