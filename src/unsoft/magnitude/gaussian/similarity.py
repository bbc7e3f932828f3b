"""The similarity of points, exp(-|x - y|^2), by compiled code where there is some and by torch everywhere
else.

Points come scaled (x = k sqrt(t / d), see points.py), so that the kernel has no parameter and t learns
through the scaling. Gradients are written out: they exist where points coincide, where the gradient of a
distance does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.engines.gaussian import kernels_for
from unsoft.magnitude.autograd import apply
from unsoft.magnitude.untraced import full_precision

_EXACT = "donot_use_mm_for_euclid_dist"  # near-clones lose all their digits in |x|^2 + |y|^2 - 2 x y


def pull(x: Tensor, w: Tensor) -> Tensor:
    """-2 sum_l w_jl (x_j - x_l): the gradient that a symmetric w = Z (gradient of Z, both ways) puts on the
    points. Overwrites w.
    """
    w.diagonal(dim1=-2, dim2=-1).zero_()  # a point has no distance from itself
    return 2 * (w @ x - w.sum(-1, keepdim=True) * x)


class _Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, diagonal: float, engine: str) -> Tensor:
        z = between(x, x, engine)
        z.diagonal(dim1=-2, dim2=-1).fill_(diagonal)
        ctx.save_for_backward(x, z)
        return z

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, z = ctx.saved_tensors
        return pull(x, z * (grad + grad.mT)), None, None


def gaussian_within(x: Tensor, diagonal: float, engine: str) -> Tensor:
    """exp(-|x_j - x_l|^2), shape (systems, n, n), of points (systems, n, d), with another diagonal."""
    z: Tensor = apply(_Within, x, diagonal, engine)
    return z


def between(x: Tensor, y: Tensor, engine: str) -> Tensor:
    """:func:`gaussian` without a gradient."""
    kernels = kernels_for(x, engine)
    if kernels is not None:
        return kernels.between(x, y)
    return torch.cdist(x, y, compute_mode=_EXACT).square().neg().exp()


class _Gaussian(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, engine: str) -> Tensor:
        z = between(x, y, engine)
        ctx.save_for_backward(x, y, z)
        return z

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, y, z = ctx.saved_tensors
        w = 2 * grad * z
        dx = w @ y - w.sum(2)[..., None] * x if ctx.needs_input_grad[0] else None
        dy = w.mT @ x - w.sum(1)[..., None] * y if ctx.needs_input_grad[1] else None
        return dx, dy, None


def gaussian(x: Tensor, y: Tensor, engine: str = "auto") -> Tensor:
    """exp(-|x_j - y_l|^2), shape (systems, n, m), of points (systems, n, d) and (systems, m, d).

    >>> x = torch.zeros(1, 2, 3, requires_grad=True)
    >>> gaussian(x, x).sum().backward()
    >>> x.grad.abs().max()                                                  # coinciding points: 0, not NaN
    tensor(0.)
    """
    z: Tensor = apply(_Gaussian, x, y, engine)
    return z
