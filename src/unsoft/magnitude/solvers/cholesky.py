"""The exact solver: one factorisation; in float64 if float32 does not do."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.magnitude.gaussian.matrix import working_dtype
from unsoft.magnitude.gaussian.system import System
from unsoft.magnitude.solvers.contract import Options, Outcome, Status, relative
from unsoft.magnitude.solvers.registry import register


@torch.no_grad()
def cholesky(system: System, b: Tensor, options: Options) -> Outcome:
    """Once more in float64 if float32 fails or leaves a residual above the tolerance.

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
