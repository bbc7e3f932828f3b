"""Checked points, scale, ridge and mask of a user, in one layout."""

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from unsoft.magnitude.gaussian import System


@dataclass(frozen=True)
class Points:
    """Scaled points of several systems: Z_jl = exp(-|x_j - x_l|^2) is the similarity matrix of each."""

    x: Tensor
    """(systems, n, d) = k sqrt(t / d), float32 or float64; 0 where absent."""
    present: Tensor | None
    """Bool (systems, n), or None if all are."""
    leading: torch.Size
    """Shape of the batch of systems."""

    def system(self, eps: float, engine: str = "auto") -> System:
        """Return the matrices of the points, with their ridge."""
        return System(self.x, self.present, eps, engine)

    def shaped(self, y: Tensor) -> Tensor:
        """Return a result (systems, ...) with the original batch dimensions."""
        return y.reshape(self.leading + y.shape[1:])


def checked_points(points: Tensor, t: float | Tensor, mask: Tensor | None, where: str) -> Points:
    """Raise ValueError or TypeError, naming the argument, unless points (..., n, d), t and mask fit
    together."""
    if not isinstance(points, Tensor):
        raise TypeError(
            f"{where}: argument 'points' must be a tensor (..., n, d), not {type(points).__name__}"
        )
    if not points.is_floating_point():
        raise TypeError(
            f"{where}: argument 'points' has dtype {points.dtype}; use a floating one, such as points.float()"
        )
    if points.dim() < 2 or points.shape[-1] == 0:
        raise ValueError(
            f"{where}: argument 'points' has shape {tuple(points.shape)}; expected (..., n, d) with d of at"
            " least 1"
        )
    *leading, n, d = points.shape
    x = points.to(torch.float64 if points.dtype == torch.float64 else torch.float32)
    present = _checked_mask(mask, points.shape, where)
    if present is not None:
        x = torch.where(present[..., None], x, 0.0)
    if not torch.compiler.is_compiling() and not bool(x.isfinite().all()):
        raise ValueError(
            f"{where}: argument 'points' holds NaN or Inf; mask those points (mask=) or repair them"
        )
    factor = _checked_scale(t, x, leading, where)
    systems = math.prod(leading)
    x = (x * (factor / d).sqrt()).reshape(systems, n, d)
    return Points(x, None if present is None else present.reshape(systems, n), torch.Size(leading))


def checked_eps(eps: float, where: str, least: float = 0.0) -> float:
    """Raise ValueError unless eps is a finite number of at least ``least``."""
    if not isinstance(eps, Real) or isinstance(eps, bool):
        raise TypeError(f"{where}: argument 'eps' must be a number, not {type(eps).__name__}")
    if not (math.isfinite(eps) and eps >= least):
        raise ValueError(f"{where}: argument 'eps' must be finite and at least {least:g}, not {eps}")
    return float(eps)


def _checked_mask(mask: Tensor | None, shape: torch.Size, where: str) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"{where}: argument 'mask' must be a bool tensor (True = the point is there), not {got}"
        )
    try:
        return mask.expand(shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"{where}: argument 'mask' has shape {tuple(mask.shape)}; it must broadcast to"
            f" {tuple(shape[:-1])}, the points without d"
        ) from None


def _checked_scale(t: float | Tensor, x: Tensor, leading: list[int], where: str) -> Tensor:
    """Return t as a tensor (..., 1, 1) in the dtype of x."""
    if isinstance(t, bool) or not isinstance(t, (Real, Tensor)):
        raise TypeError(f"{where}: argument 't' must be a number or a tensor, not {type(t).__name__}")
    factor = (
        t.to(x.dtype) if isinstance(t, Tensor) else torch.tensor(float(t), dtype=x.dtype, device=x.device)
    )
    if not torch.compiler.is_compiling() and not bool(((factor > 0) & factor.isfinite()).all()):
        worst = factor.detach().flatten()[~((factor > 0) & factor.isfinite()).flatten()][0].item()
        raise ValueError(f"{where}: argument 't' must be positive and finite, not {worst:g}")
    try:
        return factor.expand(leading)[..., None, None]
    except RuntimeError:
        raise ValueError(
            f"{where}: argument 't' has shape {tuple(factor.shape)}; it must broadcast to the batch of"
            f" points, {tuple(leading)}"
        ) from None
