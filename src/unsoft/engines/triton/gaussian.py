"""Gaussian matrices on a GPU: built in tiles, multiplied, and the gradient of points; the kernels are in
kernel/gaussian.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.triton import gating
from unsoft.engines.triton.availability import device_of, first_failure
from unsoft.engines.triton.binding import on_device
from unsoft.engines.triton.call_arguments import padded, precision
from unsoft.engines.triton.kernel.structures import GaussianFixed, GaussianShape
from unsoft.engines.triton.launch import INTERPRETED_SIZES, Launch, interpreted, start
from unsoft.engines.triton.tile_sizes import TileSizes

STORED = 2**28
"""Up to this many numbers the matrices of a call are kept: reading one costs less than making it again from
points of 64 coordinates. Larger ones exist in tiles only."""
_PROGRAMS = 512
"""So many programs keep a large GPU busy."""
_COORDINATES = 64
"""Of the points of a tile, at most."""
SIZES = {False: TileSizes(64, 64, 4, 1), True: TileSizes(32, 32, 4, 1)}
"""Rows and columns of a tile, warps and stages, by whether numbers are float64."""
GRADIENT_SIZES = TileSizes(32, 32, 4, 1)
"""Of the kernel for gradients; found, like the others, by compiling: nothing is spilled."""


def kernels_failure(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why the kernels for float32 or float64 do not compile or run on the device; None if they do."""
    return first_failure(_small_call, device, index, dtype)


def _small_call(device: str, index: int | None, dtype: torch.dtype) -> None:
    """All kernels once."""
    x = torch.zeros(1, 1, 1, device=device_of(device, index), dtype=dtype)
    for kept in (0, 1):
        z = TiledGaussian(x, None, x[..., 0], most=kept)
        z.gradient(x, z.product(x[..., 0])[:, None])
    value, gate = x[None], x[None, ..., 0]
    gating.backward(gating.forward(value, gate), value, gate)


class TiledGaussian:
    """What :class:`unsoft.engines.native.gaussian.PackedGaussian` is, on a GPU. Matrices beyond ``most``
    numbers are not kept: every product makes their tiles again. ``reuse`` is not: a GPU does all systems at
    once."""

    def __init__(
        self,
        x: Tensor,
        present: Tensor | None = None,
        first: Tensor | None = None,
        reuse: object = None,
        *,
        most: int = STORED,
    ) -> None:
        systems, points, _ = x.shape
        self.x = x.detach().contiguous()
        self._coordinates = self.x.mT.contiguous()
        self._present = None if present is None else present.to(x.dtype).contiguous()
        self._matrix: Tensor | None = None
        if systems * points**2 <= most:
            self._matrix = x.new_empty(systems, points, points)
        self.first_product = x.new_empty(0)
        if first is not None:
            self.first_product = self._multiplied(first, stored=False)
        elif self._matrix is not None:
            _run_product(self._coordinates, self._coordinates, self._present, self._matrix, None)

    def product(self, x: Tensor) -> Tensor:
        """Z x for vectors (systems, n)."""
        return self._multiplied(x, stored=self._matrix is not None)

    def gradient(self, u: Tensor, v: Tensor) -> Tensor:
        """The gradient of sum_r u_r Z v_r with respect to the points; u and v are (systems, rank, n)."""
        from unsoft.engines.triton.kernel.gaussian import gradient_kernel

        result = torch.empty_like(self.x)
        systems, points, width = self.x.shape
        coordinates = min(padded(width), _COORDINATES)
        arguments = {
            "x": self._coordinates,
            "points": self.x,
            "present": self._present,
            "matrix": self._matrix,
            "u": u.contiguous(),
            "v": v.contiguous(),
            "result": result,
            "rank": u.shape[1],
            "shape": GaussianShape(points, points, width, 1, points),
            "FIXED": _fixed(self.x, stored=self._matrix is not None, coordinates=coordinates),
        }
        blocks = -(-width // coordinates)
        sizes = INTERPRETED_SIZES if interpreted() else GRADIENT_SIZES
        _start("gaussian_gradient", gradient_kernel, arguments, lambda rows: rows * blocks, self.x, sizes)
        return result

    def _multiplied(self, x: Tensor, *, stored: bool) -> Tensor:
        return _run_product(
            self._coordinates, self._coordinates, self._present, self._matrix, x.contiguous(), stored=stored
        )


def between(x: Tensor, y: Tensor) -> Tensor:
    """exp(-|x_j - y_l|^2) for points (systems, n, d) and (systems, m, d): a tensor (systems, n, m)."""
    matrix = x.new_empty(len(x), x.shape[1], y.shape[1])
    if matrix.numel():
        rows, columns = (points.detach().mT.contiguous() for points in (x, y))
        _run_product(rows, columns, None, matrix, None)
    return matrix


def _run_product(
    x: Tensor,
    y: Tensor,
    present: Tensor | None,
    matrix: Tensor | None,
    vector: Tensor | None,
    *,
    stored: bool = False,
) -> Tensor:
    """Coordinates are (systems, d, n). The product with the vector (systems, columns), if there is one."""
    from unsoft.engines.triton.kernel.gaussian import product_kernel

    (systems, width, rows), columns = x.shape, y.shape[2]
    sizes = INTERPRETED_SIZES if interpreted() else SIZES[x.dtype == torch.float64]
    across = -(-columns // sizes.keys)
    parts = across  # nothing is summed: a program for each tile
    if vector is not None:
        parts = min(max(_PROGRAMS // (systems * -(-rows // sizes.rows)), 1), across)
    span = -(-across // parts) * sizes.keys
    sums = x.new_empty(systems, parts, rows if vector is not None else 0)
    arguments = {
        "x": x,
        "y": y,
        "present": present,
        "matrix": matrix,
        "vector": vector,
        "result": None if vector is None else sums,
        "shape": GaussianShape(rows, columns, width, parts, span),
        "FIXED": _fixed(x, stored=stored),
    }
    _start("gaussian_product", product_kernel, arguments, lambda blocks: blocks * parts, x, sizes)
    return sums[:, 0] if parts == 1 else sums.sum(1)


def _fixed(x: Tensor, *, stored: bool, coordinates: int = 0) -> GaussianFixed:
    return GaussianFixed(stored, coordinates, precision(x.dtype))


def _start(
    name: str,
    kernel: Any,
    arguments: dict[str, Any],
    grid: Callable[[int], int],
    x: Tensor,
    sizes: TileSizes,
) -> None:
    """``grid``: from the number of blocks of rows to that of programs of a system."""
    programs = grid(-(-arguments["shape"].rows // sizes.rows)), len(x)
    with on_device(x):
        start(Launch(name, kernel, arguments, lambda _: programs, "", x.dtype, (sizes,)))
