"""Which engine computes with Gaussian matrices Z_jl = exp(-|x_j - x_l|^2), the work of magnitude.

native  compiled code       CPU
torch   torch operations    everything, any device

An engine brings kernels; torch operations need none: they stand beside each use in :mod:`unsoft.magnitude`.
A GPU engine is one more entry here, with kernels of its own. The argument ``engine`` of attention does not
choose here: the first engine that can do the work takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.engines.native.gaussian import (
    PackedGaussian,
    congruences,
    gaussian_between,
    gaussian_ready,
    inverse_factors,
    pivoted,
)
from unsoft.engines.native.gaussian_arrival import ArrivalFactors, WindowKernel
from unsoft.engines.registry import Engine, Registry


@dataclass(frozen=True)
class GaussianKernels:
    """What an engine brings; each takes and returns what its namesake of the native engine does."""

    between: Callable[[Tensor, Tensor], Tensor]
    """Similarities of two sets of points."""
    matrix: type[PackedGaussian]
    """Those within a set, as something to multiply with."""
    inverse_factors: Callable[[Tensor], tuple[Tensor, int]]
    congruences: Callable[[Tensor, Tensor], Tensor]
    pivoted: Callable[[Tensor, Tensor | None, int, float, float], tuple[Tensor, Tensor, Tensor]]
    arrival: type[ArrivalFactors]
    """Weights of every point among those before it."""
    window: type[WindowKernel]
    """The same for points that come one by one."""


_NATIVE = GaussianKernels(
    between=gaussian_between,
    matrix=PackedGaussian,
    inverse_factors=inverse_factors,
    congruences=congruences,
    pivoted=pivoted,
    arrival=ArrivalFactors,
    window=WindowKernel,
)


def _native_unsupported(x: Tensor) -> str | None:
    if x.device.type != "cpu":
        return f"its Gaussian kernels run on the CPU, and the points are on {x.device}"
    return None


def _native_ready(x: Tensor) -> bool:
    return gaussian_ready(x.dtype == torch.float64)


GAUSSIAN: Registry[Tensor, GaussianKernels | None] = Registry(
    [
        Engine("native", _native_unsupported, lambda x: _NATIVE, ready=_native_ready),
        Engine("torch", lambda x: None, lambda x: None),
    ],
    fallback="torch",
)
"""All engines for Gaussian matrices, the preferred ones first; they are given points, float32 or float64."""


def kernels_for(x: Tensor) -> GaussianKernels | None:
    """The kernels of the first engine that can work on points, or matrices, like these; None: torch does.

    >>> kernels_for(torch.zeros(1, 3, 2, device="meta")) is None
    True
    """
    return GAUSSIAN.choose("auto", x).run(x)
