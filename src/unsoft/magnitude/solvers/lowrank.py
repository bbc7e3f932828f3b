"""The low-rank solver: a few points stand for all, and every point keeps its own diagonal.

    Z ~ C A^-1 C^T + diag(1 - what that explains)        C: similarities to the chosen points, A: among them

Crowds are explained by one point each and share its weight; an isolated point that was not chosen keeps
weight near 1, by its diagonal. Cost n rank^2 instead of n^3. The residual is measured on a sample of rows,
the worst explained among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.magnitude.gaussian.factor import inverse_factor
from unsoft.magnitude.gaussian.matrix import matrix
from unsoft.magnitude.gaussian.similarity import gaussian
from unsoft.magnitude.gaussian.system import System
from unsoft.magnitude.solvers.contract import Options, Outcome, Status
from unsoft.magnitude.solvers.pivoted import pivoted_cholesky
from unsoft.magnitude.solvers.registry import register
from unsoft.magnitude.untraced import untraced

_SAMPLE = 64


RANK = 256


@untraced
def lowrank(system: System, b: Tensor, options: Options) -> Outcome:
    """Differentiable (the choice of points is held fixed), with the estimated residual."""
    x, present, eps, engine = system.x, system.present, system.eps, system.engine
    tolerance = options.tolerance
    chosen = pivoted_cholesky(system, options.rank or RANK, tolerance * eps)
    # Members of a crowd get b / own minus almost all of it: float32 would keep no digit of what is left.
    dtype, x, b = x.dtype, x.double(), b.double()
    centres = x.gather(1, chosen.pivots[..., None].expand(-1, -1, x.shape[-1]))
    c = torch.where(chosen.taken[:, None, :], gaussian(x, centres, engine), 0.0)
    if present is not None:
        c = torch.where(present[..., None], c, 0.0)
    jitter = 16 * torch.finfo(x.dtype).eps
    # (systems, n, rank), thin thin^T = C A^-1 C^T
    thin = c @ inverse_factor(matrix(centres, chosen.taken, jitter, engine), engine).mT
    unit = torch.eye(thin.shape[-1], dtype=x.dtype, device=x.device)
    own = (1 - thin.square().sum(-1)).clamp(min=0) + eps  # the diagonal that each point keeps to itself
    if present is not None:
        own = torch.where(present, own, 1.0)
    scaled = thin / own[..., None]
    inner = inverse_factor(unit + scaled.mT @ thin, engine)
    explained = inner @ (scaled.mT @ b[..., None])
    weights = b / own - (scaled @ (inner.mT @ explained))[..., 0]
    rank = chosen.pivots.shape[1]
    residual = (
        _sampled_residual(system.to(x.dtype), b, weights, chosen.left)
        if options.check
        else b.new_zeros(len(b))
    )
    status = Status.CONVERGED if not len(x) or float(residual.amax()) <= tolerance else Status.INEXACT
    return Outcome(weights.to(dtype), residual.to(dtype), status, 0, torch.float64, rank)


@torch.no_grad()
def _sampled_residual(system: System, b: Tensor, weights: Tensor, left: Tensor) -> Tensor:
    """Root mean square of b - (Z + eps) w over rows spread evenly and over the rows that are
    explained worst.
    """
    x, n = system.x, system.x.shape[1]
    even = torch.arange(0, n, max(1, n // _SAMPLE), device=x.device)[:_SAMPLE].expand(len(x), -1)
    rows = torch.cat([even, left.topk(min(_SAMPLE // 4, n), dim=-1).indices], dim=-1)
    z = gaussian(x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1])), x, system.engine)
    error = b.gather(1, rows) - (z @ weights[..., None])[..., 0] - system.eps * weights.gather(1, rows)
    there = b.gather(1, rows) != 0
    return (torch.where(there, error, 0.0).square().sum(-1) / there.sum(-1).clamp(min=1)).sqrt()


register("lowrank", lowrank, takes=("rank",), differentiable=True, needs_ridge=True)
