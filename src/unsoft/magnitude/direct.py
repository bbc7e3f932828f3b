"""Direct solvers: ``cholesky`` (exact), and ``lowrank``, in which a few points stand for all.

Pivoted Cholesky finds these points one after the other, without forming the matrix:

    Z ~ F F^T, F (n, rank);  what is left, Z - F F^T, is positive semidefinite: its trace bounds every error
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.engines.gaussian import kernels_for
from unsoft.magnitude.gaussian import System, gaussian, inverse_factor, untraced, working_dtype
from unsoft.magnitude.solver import Options, Outcome, Status, register, relative


@torch.no_grad()
def cholesky(system: System, b: Tensor, options: Options) -> Outcome:
    """Solve by one factorisation, again in float64 if float32 fails or leaves a residual above the tolerance.

    With a small eps a small residual promises little about the weights of points that nearly coincide:
    float64 at once.
    """
    own = system.x.dtype
    for dtype in dict.fromkeys((working_dtype(own, system.eps), torch.float64)):
        a = system.to(dtype).matrix()
        factor, failed = torch.linalg.cholesky_ex(a)
        if bool(failed.any()):
            continue
        y = torch.cholesky_solve(b.to(dtype)[..., None], factor)
        residual = relative(b - (a @ y)[..., 0], b)
        if dtype == torch.float64 or float(residual.amax()) <= options.tolerance:
            status = Status.CONVERGED if bool(y.isfinite().all()) else Status.SINGULAR
            return Outcome(y[..., 0].to(own), residual.to(own), status, 0, dtype)
    nothing = torch.full_like(b, torch.nan)
    return Outcome(nothing, nothing.new_full((len(b),), torch.nan), Status.SINGULAR, 0, torch.float64)


register("cholesky", cholesky)


_CHECK = 8
"""Steps between looks at the trace (each look waits for the device)."""


@dataclass(frozen=True)
class Pivoted:
    """F, which points were taken, and what is left of the diagonal of Z."""

    factor: Tensor
    """(systems, n, rank)"""
    pivots: Tensor
    """(systems, rank), indices of points"""
    taken: Tensor
    """(systems, rank): False where a system had nothing left to explain while others had"""
    left: Tensor
    """(systems, n), at least 0"""


@torch.no_grad()
def pivoted_cholesky(system: System, rank: int, tolerance: float) -> Pivoted:
    """Take the point that is explained worst, until the mean of what is left is below the tolerance or the
    rank is reached. eps plays no part.

    >>> x = torch.tensor([[[0.0], [0.0], [9.0], [9.0], [9.0]]])                     # two crowds
    >>> pivoted = pivoted_cholesky(System(x, None, 0.0), rank=5, tolerance=1e-6)
    >>> pivoted.pivots.tolist(), pivoted.left.sum().item()
    ([[0, 2]], 0.0)
    """
    x, present, engine = system.x, system.present, system.engine
    least = 32 * torch.finfo(x.dtype).eps
    kernels = kernels_for(x, engine)
    if kernels is not None and kernels.pivoted is not None:
        factor, pivots, left = kernels.pivoted(x, present, min(rank, x.shape[1]), tolerance, least)
        made = int((pivots >= 0).sum(-1).max()) if pivots.numel() else 0
        factor, pivots = factor[:, :made].mT, pivots[:, :made]
        return Pivoted(factor, pivots.clamp(min=0), pivots >= 0, left)
    systems, n, _ = x.shape
    seen = system.ones
    rank = min(rank, n)
    factor = x.new_zeros(rank, systems, n)
    pivots = torch.zeros(rank, systems, dtype=torch.long, device=x.device)
    was_taken = torch.zeros_like(pivots, dtype=torch.bool)
    left, rows = seen.clone(), torch.arange(systems, device=x.device)
    made = 0
    # Steps beyond the tolerance do no harm but cost time: look after each of the first ones.
    for step in range(rank):
        looks = step < _CHECK or step % _CHECK == 0
        if looks and bool((left.sum(-1) <= tolerance * seen.sum(-1)).all()):
            break
        value, pivot = left.max(-1)
        column = gaussian(x[rows, pivot][:, None], x, engine)[:, 0] * seen
        known = factor[:step, rows, pivot]  # (step, systems)
        column = column - torch.einsum("ks,ksn->sn", known, factor[:step])
        taken = value > least
        # A system with nothing left gets a column of zeros; dividing by its rounding error would add noise.
        f = torch.where(taken[:, None], column / torch.where(taken, value, 1.0).sqrt()[:, None], 0.0)
        factor[step], pivots[step], was_taken[step] = f, pivot, taken
        # Exactly 0 at the pivot, so that rounding never makes the same point a pivot twice.
        left = (left - f.square()).clamp(min=0).scatter(1, pivot[:, None], 0.0)
        made = step + 1
    return Pivoted(factor[:made].permute(1, 2, 0), pivots[:made].T, was_taken[:made].T, left)


_SAMPLE = 64


RANK = 256


@untraced
def lowrank(system: System, b: Tensor, options: Options) -> Outcome:
    """Solve with the points of :func:`pivoted_cholesky`; differentiable (the choice of points is fixed), with
    an estimated residual."""
    x, present, eps, engine = system.x, system.present, system.eps, system.engine
    tolerance = options.tolerance
    chosen = pivoted_cholesky(system, options.rank or RANK, tolerance * eps)
    # Members of a crowd get b / own minus almost all of it: float32 would keep no digit of what is left.
    dtype, x, b = x.dtype, x.double(), b.double()
    centres = x.gather(1, chosen.pivots[..., None].expand(-1, -1, x.shape[-1]))
    c = torch.where(chosen.taken[:, None, :], gaussian(x, centres, engine), 0.0)
    if present is not None:
        c = torch.where(present[..., None], c, 0.0)
    jitter = (
        16 * torch.finfo(x.dtype).eps
    )  # pivots may nearly coincide: rounding must not make this indefinite
    # (systems, n, rank), thin thin^T = C A^-1 C^T
    thin = c @ inverse_factor(System(centres, chosen.taken, jitter, engine).matrix(), engine).mT
    unit = torch.eye(thin.shape[-1], dtype=x.dtype, device=x.device)
    own = (1 - thin.square().sum(-1)).clamp(min=0) + eps  # the diagonal that each point keeps to itself
    if present is not None:
        own = torch.where(present, own, 1.0)
    # Woodbury: (D + T T^T)^-1 = D^-1 - D^-1 T (1 + T^T D^-1 T)^-1 T^T D^-1, a system of rank x rank.
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
    """Return the root mean square of b - (Z + eps) w over rows spread evenly and over the rows that are
    explained worst."""
    x, n = system.x, system.x.shape[1]
    even = torch.arange(0, n, max(1, n // _SAMPLE), device=x.device)[:_SAMPLE].expand(len(x), -1)
    rows = torch.cat([even, left.topk(min(_SAMPLE // 4, n), dim=-1).indices], dim=-1)
    z = gaussian(x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1])), x, system.engine)
    error = b.gather(1, rows) - (z @ weights[..., None])[..., 0] - system.eps * weights.gather(1, rows)
    there = b.gather(1, rows) != 0
    return (torch.where(there, error, 0.0).square().sum(-1) / there.sum(-1).clamp(min=1)).sqrt()


register("lowrank", lowrank, takes=("rank",), differentiable=True, needs_ridge=True)
