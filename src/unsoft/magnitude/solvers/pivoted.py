"""Pivoted Cholesky: the few points that explain a Gaussian matrix best, found one after the other without
forming it.

Z ~ F F^T, F (n, rank);  what is left, Z - F F^T, is positive semidefinite, so its trace bounds every error
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.engines.gaussian import kernels_for
from unsoft.magnitude.gaussian.similarity import gaussian
from unsoft.magnitude.gaussian.system import System

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
    """Takes the point that is explained worst, until the mean of what is left is below the tolerance or the
    rank is reached. eps plays no part.

    >>> x = torch.tensor([[[0.0], [0.0], [9.0], [9.0], [9.0]]])                     # two crowds
    >>> found = pivoted_cholesky(System(x, None, 0.0), rank=5, tolerance=1e-6)
    >>> found.pivots.tolist(), found.left.sum().item()
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
        f = torch.where(taken[:, None], column / torch.where(taken, value, 1.0).sqrt()[:, None], 0.0)
        factor[step], pivots[step], was_taken[step] = f, pivot, taken
        left = (left - f.square()).clamp(min=0).scatter(1, pivot[:, None], 0.0)
        made = step + 1
    return Pivoted(factor[:made].permute(1, 2, 0), pivots[:made].T, was_taken[:made].T, left)
