"""Random draws for tasks, each from a generator, so that a seed reproduces the data."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator(seed: int, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for a seed and names. Its 32-bit seed is a digest of all of them.

    >>> first, second = (torch.rand(1, generator=generator(0, "test", index)) for index in (0, 1))
    >>> bool(first == second)
    False
    """
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=4).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def integers(below: int, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Return uniform whole numbers from 0 to ``below`` - 1."""
    return torch.randint(below, shape, generator=random)


def one_integer(low: int, high: int, random: torch.Generator) -> int:
    """Return a whole number from ``low`` to ``high``, both included."""
    return int(torch.randint(low, high + 1, (), generator=random))


def distinct(count: int, below: int, many: int, random: torch.Generator) -> Tensor:
    """Return ``many`` different numbers under ``below`` in random order, (count, many).

    >>> distinct(1, 3, 3, generator(0)).sort().values
    tensor([[0, 1, 2]])
    """
    return torch.rand(count, below, generator=random).argsort(1)[:, :many]


def normal(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(shape, generator=random)


def shuffled(items: Tensor, random: torch.Generator) -> Tensor:
    """Shuffle the items of dimension 1, independently for each row."""
    order = torch.rand(items.shape[:2], generator=random).argsort(1)
    return take(items, order)


def take(items: Tensor, which: Tensor) -> Tensor:
    """Return the items of dimension 1 with indices ``which`` (batch, many)."""
    index = which.reshape(*which.shape, *(1 for _ in items.shape[2:]))
    return items.gather(1, index.expand(*which.shape, *items.shape[2:]))
