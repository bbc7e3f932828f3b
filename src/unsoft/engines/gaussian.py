"""The engines that compute with Gaussian matrices Z_jl = exp(-|x_j - x_l|^2), for magnitude.

native  compiled code       CPU
triton  kernels             GPUs
torch   torch operations    everything, any device

An engine provides kernels. Torch operations are beside each use in :mod:`unsoft.magnitude`, for everything
that an engine has no kernel for. Magnitude's gates are computed by the engine that the argument ``engine`` of
attention names if it is listed here, otherwise by torch: "tiled" and "dense" run no compiled code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.engines.native import gaussian as native
from unsoft.engines.native.availability import library_failure
from unsoft.engines.registry import Engine, Registry, no_reason
from unsoft.engines.triton import availability as gpu
from unsoft.engines.triton.gaussian import TiledGaussian, gated, kernels_failure
from unsoft.engines.triton.gaussian import between as tiled_between


@dataclass(frozen=True)
class GaussianKernels:
    """The kernels of one engine, with the signatures of native/gaussian.py. None: torch operations."""

    between: Callable[[Tensor, Tensor], Tensor]
    """Similarities of two sets of points."""
    matrix: type[native.PackedGaussian] | type[TiledGaussian]
    """Similarities within a set, as an object that multiplies."""
    inverse_factors: Callable[[Tensor], tuple[Tensor, int]] | None = None
    congruences: Callable[[Tensor, Tensor], Tensor] | None = None
    pivoted: Callable[[Tensor, Tensor | None, int, float, float], tuple[Tensor, Tensor, Tensor]] | None = None
    arrival: type[native.ArrivalFactors] | None = None
    """Weights of every point among those before it."""
    window: type[native.WindowKernel] | None = None
    """The same for points that come one by one."""
    gated: Callable[[Tensor, Tensor], Tensor] | None = None
    """Values (..., keys, width) times gates (..., keys)."""


_NATIVE = GaussianKernels(
    between=native.gaussian_between,
    matrix=native.PackedGaussian,
    inverse_factors=native.inverse_factors,
    congruences=native.congruences,
    pivoted=native.pivoted,
    arrival=native.ArrivalFactors,
    window=native.WindowKernel,
)
_TRITON = GaussianKernels(between=tiled_between, matrix=TiledGaussian, gated=gated)


def _native_unsupported(x: Tensor) -> str | None:
    if x.device.type != "cpu":
        return f"its Gaussian kernels run on the CPU, and the points are on {x.device}"
    return None


def _triton_unsupported(x: Tensor) -> str | None:
    if reason := gpu.missing(x.device.type, x.device.index):
        return reason
    return f"more than {gpu.MOST_HEADS} systems; use 'tiled'" if len(x) > gpu.MOST_HEADS else None


def _triton_unavailable(x: Tensor) -> str | None:
    device = x.device.type, x.device.index
    return gpu.unavailable(*device) or kernels_failure(*device, x.dtype)


GAUSSIAN: Registry[Tensor, GaussianKernels | None] = Registry(
    [
        Engine(
            "native",
            _native_unsupported,
            lambda x: _NATIVE,
            unavailable_reason=lambda x: library_failure("gaussian", x.dtype == torch.float64),
        ),
        Engine(
            "triton",
            _triton_unsupported,
            lambda x: _TRITON,
            prefer=lambda x: x.device.type != "cpu",  # there Triton has an interpreter, for tests alone
            unavailable_reason=_triton_unavailable,
        ),
        Engine("torch", no_reason, lambda x: None),
    ]
)
"""All engines for Gaussian matrices, the preferred ones first; they take points, float32 or float64."""


def kernels_for(x: Tensor, engine: str) -> GaussianKernels | None:
    """Return the kernels with which an engine of attention works on points, or matrices, like these; None:
    torch operations. "auto": those of the first engine that can.

    >>> kernels_for(torch.zeros(1, 3, 2), "dense") is None
    True
    >>> kernels_for(torch.zeros(1, 3, 2, device="meta"), "auto") is None
    True
    """
    return GAUSSIAN.choose(engine if engine in GAUSSIAN.names() else "torch", x).run(x)
