"""Scenes: a few coloured shapes on a grid of cells, and their pictures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

SHAPES = ("circle", "square", "cross", "ring", "triangle", "diamond", "bar", "arch")
"""In the order in which captions name them."""
COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.8, 0.2),
    "blue": (0.2, 0.3, 1.0),
    "white": (0.95, 0.95, 0.95),
}
CELLS, CELL = 4, 8
"""A picture has 4 x 4 cells of 8 x 8 pixels; a cell is what the model sees as one visual token."""
SIZE = CELLS * CELL
_BACKGROUND, _NOISE, _SPREAD = 0.35, 0.08, 0.25


@dataclass(frozen=True)
class Thing:
    """A shape of a colour in a cell, counted row by row."""

    shape: str
    colour: str
    cell: int


@dataclass(frozen=True)
class Scene:
    """Content of a picture, in the order of captions; no shape twice."""

    things: tuple[Thing, ...]
    noise: int
    """Seed of the picture's noise."""

    @property
    def shapes(self) -> set[str]:
        return {thing.shape for thing in self.things}

    def picture(self) -> Tensor:
        """Return pixels (3, 32, 32) with the background around 0.

        >>> Scene((Thing("square", "red", 5),), noise=0).picture().shape
        torch.Size([3, 32, 32])
        """
        noise = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(self.noise))
        picture = _BACKGROUND + _NOISE * noise
        for thing in self.things:
            row, column = divmod(thing.cell, CELLS)
            cell = picture[:, row * CELL :, column * CELL :][:, :CELL, :CELL]
            colour = torch.tensor(COLOURS[thing.colour])[:, None, None]
            cell[:] = torch.where(_stencil(thing.shape), colour + cell - _BACKGROUND, cell)
        return (picture - _BACKGROUND) / _SPREAD


@cache
def _stencil(shape: str) -> Tensor:
    """Return the pixels of a cell that a shape covers."""
    at = torch.arange(CELL) - (CELL - 1) / 2
    x, y = at[None, :], at[:, None]
    radius = (x * x + y * y).sqrt()
    inside = {
        "circle": radius < 3.2,
        "square": torch.maximum(x.abs(), y.abs()) < 3,
        "triangle": (x.abs() < (y + 3.5) / 2) & (y < 3),
        "cross": (x.abs() < 1) | (y.abs() < 1),
        "ring": (radius < 3.7) & (radius > 2),
        "diamond": x.abs() + y.abs() < 3.6,
        "bar": (y.abs() < 1.2) & (x.abs() < 4),
        "arch": (torch.maximum(x.abs(), y.abs()) < 3.6) & ~((x.abs() < 1.6) & (y > -1.6)),
    }
    return inside[shape].expand(CELL, CELL)
