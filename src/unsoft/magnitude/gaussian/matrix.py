"""The matrix of a set of points: whole, with its ridge, or as something to multiply with that need not be
whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.gaussian import kernels_for
from unsoft.engines.native.gaussian import PackedGaussian
from unsoft.engines.triton.gaussian import TiledGaussian
from unsoft.magnitude.gaussian.similarity import between, gaussian_within, pull


def working_dtype(dtype: torch.dtype, eps: float) -> torch.dtype:
    """float64 where float32 could fail. It depends on nothing but eps: a choice by the points would not be
    causal.
    """
    return torch.float64 if eps < 1e-3 else dtype


def matrix(x: Tensor, present: Tensor | None, eps: float, engine: str) -> Tensor:
    """Z + eps of points (systems, n, d), differentiable; an absent point is a row of the identity."""
    z = gaussian_within(x, 1 + eps, engine)
    if present is None:
        return z
    unit = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    return torch.where(present[:, :, None] & present[:, None, :] | unit, z, 0.0)


class DenseGaussian:
    """What :class:`PackedGaussian` is, by torch: the whole matrix of each system, on any device."""

    def __init__(self, x: Tensor, present: Tensor | None = None, first: Tensor | None = None) -> None:
        self.x = x.detach()
        self.matrix = between(self.x, self.x, "torch")
        if present is not None:
            self.matrix = self.matrix * (present[:, :, None] & present[:, None, :])
        self.first_product = x.new_empty(0) if first is None else self.product(first)

    def product(self, x: Tensor) -> Tensor:
        """Z x for vectors (systems, n)."""
        return (self.matrix @ x[..., None])[..., 0]

    def gradient(self, u: Tensor, v: Tensor) -> Tensor:
        """The gradient of sum_r u_r Z v_r with respect to the points; u and v are (systems, rank, n)."""
        return pull(self.x, self.matrix * (u.mT @ v + v.mT @ u))


Matrix = PackedGaussian | TiledGaussian | DenseGaussian


def similarities(
    x: Tensor, present: Tensor | None, first: Tensor, reuse: Matrix | None, engine: str
) -> Matrix:
    """The matrix of points (systems, n, d) as something to multiply with, and its product with ``first``."""
    kernels = kernels_for(x, engine)
    if kernels is None:
        return DenseGaussian(x, present, first)
    return kernels.matrix(x, present, first, reuse if isinstance(reuse, PackedGaussian) else None)
