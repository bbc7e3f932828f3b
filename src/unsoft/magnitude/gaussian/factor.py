"""The inverse M = L^-1 of a Cholesky factor A = L L^T, from which the weights of every prefix can be read.

Rows of M depend on the rows of A up to theirs only. Derivative: dM = -F(M dA M^T) M, with F the lower half,
diagonal halved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.engines.gaussian import kernels_for
from unsoft.errors import SolverError
from unsoft.magnitude.autograd import apply
from unsoft.magnitude.untraced import full_precision, untraced

_BLOCK = 128


@untraced
def inverse_factor(a: Tensor, engine: str = "auto") -> Tensor:
    """M with M A M^T = 1 and M lower triangular, for positive definite A (systems, n, n), of which the lower
    half is read.

    The gradient is the symmetric one.

    >>> inverse_factor(torch.tensor([[[4.0, 2.0], [2.0, 5.0]]]))                # L = [[2, 0], [1, 2]]
    tensor([[[ 0.5000,  0.0000],
             [-0.2500,  0.5000]]])
    """
    m: Tensor = apply(_InverseFactor, a, engine)
    return m


def inverse_factor_of(a: Tensor, engine: str) -> Tensor:
    """:func:`inverse_factor` without a gradient."""
    kernels = kernels_for(a, engine)
    factors = None if kernels is None else kernels.inverse_factors
    m, done = _by_blocks(a) if factors is None else factors(a)
    check_done(done, a)
    return m


class _InverseFactor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, engine: str) -> Tensor:
        m = inverse_factor_of(a, engine)
        ctx.save_for_backward(m)
        ctx.engine = engine
        return m

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (m,) = ctx.saved_tensors
        return congruence(m, halved(grad @ m.mT), ctx.engine), None


def congruence(m: Tensor, t: Tensor, engine: str) -> Tensor:
    """The symmetric part of -M^T T M for lower triangular M and T: the gradient of A if T is that of M times
    M^T, halved.
    """
    kernels = kernels_for(m, engine)
    if kernels is not None and kernels.congruences is not None:
        return kernels.congruences(m, t)
    product = m.mT @ (t @ m)
    return -(product + product.mT) / 2


def check_done(done: int, x: Tensor) -> None:
    """SolverError unless all rows of a factor of x (systems, n, ...) could be computed."""
    if done < x.shape[1]:
        raise SolverError(
            f"magnitude: the matrix of similarities is not positive definite in {x.dtype} from point {done}"
            " on; points that coincide need a larger eps, or float64"
        )


def halved(x: Tensor) -> Tensor:
    """The lower half, the diagonal counted by half."""
    return x.tril() - torch.diag_embed(x.diagonal(dim1=-2, dim2=-1) / 2)


def _by_blocks(a: Tensor) -> tuple[Tensor, int]:
    """What the compiled code does, block row by block row; also the number of rows before the first that
    fails.
    """
    n = a.shape[-1]
    m = torch.zeros_like(a)
    for start in range(0, n, _BLOCK):
        new = slice(start, min(start + _BLOCK, n))
        b = a[:, new, :start] @ m[:, :start, :start].mT
        c, failed = torch.linalg.cholesky_ex(a[:, new, new] - b @ b.mT)
        if bool(failed.any()):
            return m, start + int(failed[failed > 0].min()) - 1
        own = torch.linalg.solve_triangular(
            c, torch.eye(c.shape[-1], dtype=a.dtype, device=a.device).expand_as(c), upper=False
        )
        m[:, new, new] = own
        m[:, new, :start] = -(own @ (b @ m[:, :start, :start]))
    return m, n
