"""The left side of (Z + eps) w = b, as solvers are given it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.magnitude.gaussian.matrix import Matrix, matrix, similarities


@dataclass(frozen=True)
class System:
    """The operator Z + eps, Z_jl = exp(-|x_j - x_l|^2), of several sets of points side by side."""

    x: Tensor
    """(systems, n, d), scaled; see points.py"""
    present: Tensor | None
    """Bool (systems, n), or None if all points are there."""
    eps: float

    def matrix(self) -> Tensor:
        """Z + eps as a tensor (systems, n, n), differentiable."""
        return matrix(self.x, self.present, self.eps)

    def similarities(self, first: Tensor, reuse: Matrix | None = None) -> Matrix:
        """Z, without eps, as something to multiply with, and its product with ``first`` (systems, n)."""
        return similarities(self.x, self.present, first, reuse)

    def to(self, dtype: torch.dtype) -> System:
        return System(self.x.to(dtype), self.present, self.eps)

    def groups(self, *more: Tensor) -> Iterator[tuple[System, list[Tensor]]]:
        """As many systems at a time as there are threads (all at once on other devices), with their parts of
        ``more``.
        """
        x, present = self.x, self.present
        size = torch.get_num_threads() if x.device.type == "cpu" else max(len(x), 1)
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            group = System(x[part], None if present is None else present[part], self.eps)
            yield group, [y[part] for y in more]
