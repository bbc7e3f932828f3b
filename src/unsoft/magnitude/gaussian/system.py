"""The matrices Z + eps of sets of points: what solvers and arrival weights are computed from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unsoft.magnitude.gaussian.matrix import Matrix, matrix, similarities, working_dtype


@dataclass(frozen=True)
class System:
    """The operator Z + eps, Z_jl = exp(-|x_j - x_l|^2), of several sets of points side by side."""

    x: Tensor
    """(systems, n, d), scaled; see points.py"""
    present: Tensor | None
    """Bool (systems, n), or None if all points are there."""
    eps: float
    engine: str = "auto"
    """Which engine of attention computes with Z; see :mod:`unsoft.engines.gaussian`."""

    @property
    def ones(self) -> Tensor:
        """The right-hand side (systems, n): 1 for every point that is present."""
        if self.present is None:
            return self.x.new_ones(self.x.shape[:2])
        return self.present.to(self.x.dtype)

    def matrix(self) -> Tensor:
        """Z + eps as a tensor (systems, n, n), differentiable."""
        return matrix(self.x, self.present, self.eps, self.engine)

    def similarities(self, first: Tensor, reuse: Matrix | None = None) -> Matrix:
        """Z, without eps, as something to multiply with, and its product with ``first`` (systems, n)."""
        return similarities(self.x, self.present, first, reuse, self.engine)

    def to(self, dtype: torch.dtype) -> System:
        return replace(self, x=self.x.to(dtype))

    def detach(self) -> System:
        """Without a gradient, as the forward pass of a function of our own needs it."""
        return replace(self, x=self.x.detach())

    def to_working_dtype(self) -> System:
        """In float64 where float32 could fail."""
        return self.to(working_dtype(self.x.dtype, self.eps))

    def split(self, sizes: list[int]) -> list[System]:
        """The points in pieces of these sizes; not slices, whose gradients are as long as the whole."""
        presences = [None] * len(sizes) if self.present is None else self.present.split(sizes, dim=1)
        parts = zip(self.x.split(sizes, dim=1), presences, strict=True)
        return [replace(self, x=x, present=present) for x, present in parts]

    def groups(self, *more: Tensor, numbers: int = 0) -> Iterator[tuple[System, list[Tensor]]]:
        """As many systems at a time as there are threads (all at once on other devices), or as have
        ``numbers`` numbers in their matrices, with their parts of ``more``.
        """
        x, present = self.x, self.present
        small = numbers // max(x.shape[1] ** 2, 1)
        size = max(torch.get_num_threads(), small) if x.device.type == "cpu" else max(len(x), 1)
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            group = replace(self, x=x[part], present=None if present is None else present[part])
            yield group, [y[part] for y in more]
