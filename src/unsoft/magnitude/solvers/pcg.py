"""Conjugate gradients with a pivoted-Cholesky preconditioner: fewer steps where a few points explain many."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unsoft.magnitude.gaussian.system import System
from unsoft.magnitude.solvers.conjugate import to_tolerance
from unsoft.magnitude.solvers.contract import Options, Outcome
from unsoft.magnitude.solvers.pivoted import Pivoted, pivoted_cholesky
from unsoft.magnitude.solvers.registry import register

RANK = 64


def pcg(system: System, b: Tensor, options: Options) -> Outcome:
    """``iterations`` steps at most; ``rank`` points for the preconditioner."""
    chosen = pivoted_cholesky(system, options.rank or RANK, system.eps * 1e-3)
    return to_tolerance(system, b, options.tolerance, options.iterations, preconditioner(chosen, system.eps))


def preconditioner(found: Pivoted, eps: float) -> Callable[[Tensor], Tensor]:
    """r -> (F F^T + s)^-1 r with s = eps + the mean of what is left: close to (Z + eps)^-1, at the cost of
    two thin products.
    """
    f = found.factor
    shift = eps + found.left.mean(-1)[:, None, None] + torch.finfo(f.dtype).eps
    inner = f.mT @ f + shift * torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
    half = torch.linalg.solve_triangular(
        torch.linalg.cholesky(inner), f.mT, upper=False
    )  # (systems, rank, n)

    def preconditioned(r: Tensor) -> Tensor:
        found: Tensor = (r - (half.mT @ (half @ r[..., None]))[..., 0]) / shift[..., 0]
        return found

    return preconditioned


register("pcg", pcg, takes=("iterations", "rank"))
