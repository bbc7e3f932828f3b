"""The weights of every prefix of a sequence of points, from one factorisation.

With Z + eps = L L^T of all points, M = L^-1 and y = M 1:

    weights of the first i + 1 points      w^(i) = sum of y_r M_r over r <= i
    their magnitude                        sum of y_r^2 over r <= i
    weight of the newest, w^(i)_i          y_i M_ii

The last is called the arrival weight: it stays as it is, whatever points come later.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.engines.gaussian import kernels_for
from unsoft.magnitude.gaussian import (
    System,
    between,
    check_done,
    full_precision,
    inverse_factor,
    pull,
    untraced,
)
from unsoft.magnitude.points import checked_eps, checked_points


class PrefixWeighting(NamedTuple):
    """Result of :func:`prefix_weighting`."""

    weights: Tensor
    """(..., n, n): row i holds the weights of points 0..i in the system of the first i + 1 points; 0 beyond.
    """
    magnitude: Tensor
    """(..., n): of each prefix."""
    newest: Tensor
    """(..., n): the weight that each point has when it arrives, the diagonal of ``weights``."""


def prefix_weighting(
    points: Tensor, t: float | Tensor = 1.0, eps: float = 1e-2, *, mask: Tensor | None = None
) -> PrefixWeighting:
    """Return the weights of all prefixes of points (..., n, d); arguments as in :func:`weighting`.

    In float32 an eps below 1e-3 is computed in float64 inside. A masked point has weight 0 in every row.

    >>> prefix_weighting(torch.zeros(3, 2), eps=1.0).weights               # clones: 1 / (n + eps) each
    tensor([[0.5000, 0.0000, 0.0000],
            [0.3333, 0.3333, 0.0000],
            [0.2500, 0.2500, 0.2500]])
    """
    eps = checked_eps(eps, "prefix_weighting")
    checked = checked_points(points, t, mask, "prefix_weighting")
    m, y = prefix_factors(checked.system(eps))
    table = (y[..., None] * m).cumsum(1)
    newest = y * m.diagonal(dim1=-2, dim2=-1)
    results = (table, y.square().cumsum(-1), newest)
    return PrefixWeighting(*(checked.shaped(r).to(checked.x.dtype) for r in results))


@full_precision
def prefix_factors(system: System) -> tuple[Tensor, Tensor]:
    """Return M (systems, n, n) and y (systems, n), differentiable."""
    system = system.to_working_dtype()
    m = inverse_factor(system.matrix(), system.engine)
    return m, m.sum(-1) if system.present is None else (m @ system.ones[..., None])[..., 0]


class _Factors:
    """Counterpart of :class:`ArrivalFactors` by torch; ``engine`` computes the similarities."""

    def __init__(self, x: Tensor, present: Tensor | None, b: Tensor, eps: float, engine: str) -> None:
        self.x, self.present, self.engine = x, present, engine
        self.m = inverse_factor(System(x, present, eps, engine).matrix(), "torch")
        self.y = (self.m @ b[..., None])[..., 0]
        self.weights = self.y * self.m.diagonal(dim1=-2, dim2=-1)
        self.done = x.shape[1]

    def gradient(self, slope: Tensor) -> Tensor:
        # dw_i = -(row i of M) M_ii dA w^(i), summed over i with the slopes
        table = (self.y[..., None] * self.m).cumsum_(1)
        table *= (slope * self.m.diagonal(dim1=-2, dim2=-1))[..., None]
        outer = self.m.mT @ table
        z = between(self.x, self.x, self.engine)
        if self.present is not None:
            z = torch.where(self.present[:, :, None] & self.present[:, None, :], z, 0.0)
        return pull(self.x, -z * (outer + outer.mT))


class _Arrival(torch.autograd.Function):
    """The factors of all systems are kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, system: System) -> Tensor:
        kernels = kernels_for(x, system.engine)
        arguments = (x, system.present, system.ones, system.eps)
        if kernels is None or kernels.arrival is None:
            ctx.factors = _Factors(*arguments, system.engine)
        else:
            ctx.factors = kernels.arrival(*arguments)
        check_done(ctx.factors.done, x)
        weights: Tensor = ctx.factors.weights
        return weights

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.factors.gradient(grad), None


@untraced
def arrival_weights(system: System) -> Tensor:
    """Return the weight of each point when it arrives (systems, n), differentiable."""
    dtype, system = system.x.dtype, system.to_working_dtype()
    weights: Tensor = _Arrival.apply(system.x, system)  # type: ignore[no-untyped-call]
    return weights.to(dtype)
