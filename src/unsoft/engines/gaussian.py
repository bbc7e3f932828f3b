"""Which engine computes with Gaussian matrices Z_jl = exp(-|x_j - x_l|^2), the work of magnitude.

native  compiled code       CPU
torch   torch operations    everything, any device

An engine brings kernels; torch operations need none: they stand beside each use in :mod:`unsoft.magnitude`.
A GPU engine is one more entry here, with kernels of its own. Magnitude's gates are computed by the engine
that the argument ``engine`` of attention names, if it is listed here, and by torch if it is another one:
"tiled" and "dense" run no compiled code.
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
    inverse_factors,
    pivoted,
    unavailable,
)
from unsoft.engines.native.gaussian_arrival import ArrivalFactors, WindowKernel
from unsoft.engines.registry import Engine, Registry


@dataclass(frozen=True)
class GaussianKernels:
    """The kernels of one engine; each has the signature of the native one below."""

    between: Callable[[Tensor, Tensor], Tensor]
    """Similarities of two sets of points."""
    matrix: type[PackedGaussian]
    """Similarities within a set, as an object that multiplies."""
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
    reason = unavailable(x.dtype == torch.float64)
    return None if reason is None else f"its Gaussian kernels are not available ({reason})"


GAUSSIAN: Registry[Tensor, GaussianKernels | None] = Registry(
    [
        Engine("native", _native_unsupported, lambda x: _NATIVE),
        Engine("torch", lambda x: None, lambda x: None),
    ],
    fallback="torch",
)
"""All engines for Gaussian matrices, the preferred ones first; they are given points, float32 or float64."""


def kernels_for(x: Tensor, engine: str) -> GaussianKernels | None:
    """The kernels with which an engine of attention works on points, or matrices, like these; None: torch
    operations. "auto": those of the first engine that can.

    >>> kernels_for(torch.zeros(1, 3, 2), "dense") is None
    True
    >>> kernels_for(torch.zeros(1, 3, 2, device="meta"), "auto") is None
    True
    """
    return GAUSSIAN.choose(engine if engine in GAUSSIAN.names() else "torch", x).run(x)
