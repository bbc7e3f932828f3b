"""The exact solver: one factorisation; in float64 if float32 does not do."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.magnitude.kernel import gaussian_within
from unsoft.magnitude.status import Outcome, Status, relative


def working_dtype(dtype: torch.dtype, eps: float) -> torch.dtype:
    """float64 where float32 could fail. It depends on nothing but eps: a choice by the points would not be causal."""
    return torch.float64 if eps < 1e-3 else dtype


def matrix(x: Tensor, present: Tensor | None, eps: float) -> Tensor:
    """Z + eps of points (systems, n, d), differentiable; an absent point is a row of the identity."""
    z = gaussian_within(x, 1 + eps)
    if present is None:
        return z
    unit = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    return torch.where(present[:, :, None] & present[:, None, :] | unit, z, 0.0)


def cholesky(x: Tensor, present: Tensor | None, b: Tensor, eps: float, tolerance: float) -> Outcome:
    """(Z + eps) w = b by Cholesky; once more in float64 if float32 fails or leaves a residual above the tolerance.

    With a small eps a small residual promises little about the weights of points that nearly coincide: float64 at once.
    """
    with torch.no_grad():
        for dtype in dict.fromkeys((working_dtype(x.dtype, eps), torch.float64)):
            a = matrix(x.to(dtype), present, eps)
            factor, failed = torch.linalg.cholesky_ex(a)
            if bool(failed.any()):
                continue
            y = torch.cholesky_solve(b.to(dtype)[..., None], factor)
            residual = relative(b - (a @ y)[..., 0], b)
            if dtype == torch.float64 or float(residual.amax()) <= tolerance:
                status = Status.CONVERGED if bool(y.isfinite().all()) else Status.SINGULAR
                return Outcome(y[..., 0].to(x.dtype), residual.to(x.dtype), status, 0, dtype)
    nothing = torch.full_like(b, torch.nan)
    return Outcome(nothing, nothing.new_full((len(b),), torch.nan), Status.SINGULAR, 0, torch.float64)
