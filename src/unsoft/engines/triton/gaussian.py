"""Magnitude on a GPU (kernels in kernel/gaussian.py): Gaussian matrices, built in tiles, multiplied, with the
gradient of points; and the gate on values as an operator.

Torch operations for the gate would read the values several times to keep those that are not finite out of the
gates' gradient, and wait for the GPU to learn whether there are any.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.operator import define, save_inputs
from unsoft.engines.triton.availability import device_of, first_failure
from unsoft.engines.triton.launch import TileSizes, padded, precision, start_on, usual_or_small, views
from unsoft.engines.triton.structures import ChunkShape, GatingFixed, GaussianFixed, GaussianShape

STORED = 2**28
"""Up to this many numbers the matrices of a call are kept: reading one costs less than computing it again
from points of 64 coordinates. Larger matrices exist in tiles only."""
_PROGRAMS = 512
"""So many programs keep a large GPU busy."""
_COORDINATES = 64
"""Most coordinates of the points of a tile."""
SIZES = {False: TileSizes(64, 64, 4, 1), True: TileSizes(32, 32, 4, 1)}
"""Rows and columns of a tile, warps and stages, by whether numbers are float64; the largest without spilled
registers, as are the following."""
GRADIENT_SIZES = TileSizes(32, 32, 4, 1)
GATING_SIZES = TileSizes(64, 64, 4, 1)
"""Keys, columns of values at a time, warps and stages."""


def kernels_failure(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Return why the kernels for float32 or float64 do not compile or run on the device, None if they do."""
    return first_failure(_run_all_kernels, device, index, dtype)


def _run_all_kernels(device: str, index: int | None, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 1, device=device_of(device, index), dtype=dtype)
    for kept in (0, 1):
        z = TiledGaussian(x, None, x[..., 0], most=kept)
        z.gradient(x, z.product(x[..., 0])[:, None])
    value, gate = x[None], x[None, ..., 0]
    gated_gradients(gated_values(value, gate), value, gate)


class TiledGaussian:
    """The counterpart of :class:`unsoft.engines.native.gaussian.PackedGaussian` on a GPU. Matrices beyond
    ``most`` numbers are not kept: every product computes their tiles again. ``reuse`` is ignored, since a GPU
    solves all systems at once."""

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
        points_twice = (self._coordinates, self._coordinates)
        self._multiply = partial(_run_product, *points_twice, self._present, self._matrix)
        if first is not None:
            self.first_product = self._multiply(first.contiguous())
        elif self._matrix is not None:
            self._multiply(None)

    def product(self, x: Tensor) -> Tensor:
        """Return Z x for vectors (systems, n)."""
        return self._multiply(x.contiguous(), stored=self._matrix is not None)

    def gradient(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of sum_r u_r Z v_r with respect to the points; u and v are (systems, rank,
        n)."""
        from unsoft.engines.triton.kernel.gaussian import gaussian_gradient_kernel

        result, sizes = torch.empty_like(self.x), usual_or_small(GRADIENT_SIZES)
        systems, points, width = self.x.shape
        coordinates = min(padded(width), _COORDINATES)
        grid = (-(-points // sizes.rows) * -(-width // coordinates), systems)
        given = {"x": self._coordinates, "points": self.x, "present": self._present, "matrix": self._matrix}
        vectors = {"u": u.contiguous(), "v": v.contiguous(), "rank": u.shape[1], "result": result}
        shape = GaussianShape(points, points, width, 1, points)
        fixed = GaussianFixed(self._matrix is not None, coordinates, precision(self.x.dtype))
        start_on(self.x, gaussian_gradient_kernel, grid, sizes, **given, **vectors, shape=shape, FIXED=fixed)
        return result


def between(x: Tensor, y: Tensor) -> Tensor:
    """Return exp(-|x_j - y_l|^2) for points (systems, n, d) and (systems, m, d): a tensor (systems, n, m)."""
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
    """Return the product with the vector (systems, columns), if there is one. Coordinates are (systems, d,
    n)."""
    from unsoft.engines.triton.kernel.gaussian import gaussian_product_kernel

    (systems, width, rows), columns = x.shape, y.shape[2]
    sizes = usual_or_small(SIZES[x.dtype == torch.float64])
    blocks, across = -(-rows // sizes.rows), -(-columns // sizes.keys)
    parts = across  # nothing is summed: a program for each tile
    if vector is not None:
        parts = min(max(_PROGRAMS // (systems * blocks), 1), across)
    sums = x.new_empty(systems, parts, rows if vector is not None else 0)
    given = {"x": x, "y": y, "present": present, "matrix": matrix, "vector": vector}
    given["result"] = None if vector is None else sums
    shape = GaussianShape(rows, columns, width, parts, -(-across // parts) * sizes.keys)
    fixed, grid = GaussianFixed(stored, 0, precision(x.dtype)), (blocks * parts, systems)
    start_on(x, gaussian_product_kernel, grid, sizes, **given, shape=shape, FIXED=fixed)
    return sums[:, 0] if parts == 1 else sums.sum(1)


def gated(value: Tensor, gate: Tensor) -> Tensor:
    """Return values (..., keys, width) times gates (..., keys), in the dtype of the values.

    A value that is not finite gives the gate no gradient.
    """
    shape = torch.broadcast_shapes(value.shape[:-1], gate.shape)
    values, gates = value.expand(*shape, value.shape[-1]), gate.expand(shape)
    if len(shape) != 3:
        values, gates = values.reshape(-1, 1, *values.shape[-2:]), gates.reshape(-1, 1, shape[-1])
    out: Tensor = torch.ops.unsoft.triton_gated.default(values, gates)
    return out.reshape(*shape, value.shape[-1])


def gated_values(value: Tensor, gate: Tensor) -> Tensor:
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    _run_gating(value, gate, None, out, None)
    return out


def gated_gradients(grad: Tensor, value: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of values and gates."""
    d_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _run_gating(value, gate, grad.resolve_neg(), d_value, d_gate)
    return d_value, d_gate


def _run_gating(value: Tensor, gate: Tensor, grad: Tensor | None, out: Tensor, d_gate: Tensor | None) -> None:
    from unsoft.engines.triton.kernel.gaussian import gating_kernel

    batch, heads, keys, width = value.shape
    if value.numel() == 0:
        return
    sizes = usual_or_small(GATING_SIZES)
    sizes = sizes._replace(keys=min(sizes.keys, padded(width)))
    grid, shape = (-(-keys // sizes.rows), batch * heads), ChunkShape(heads, heads, keys)
    fixed = GatingFixed(width, gate.dtype == torch.float64)
    given = views(values=value.resolve_neg(), gates=gate.resolve_neg(), grad=grad, out=out)
    start_on(value, gating_kernel, grid, sizes, **given, d_gates=d_gate, shape=shape, FIXED=fixed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    run = torch.ops.unsoft.triton_gated_backward.default
    d_value, d_gate = run(grad, *ctx.saved_tensors)
    return d_value, d_gate


define(
    "triton_gated",
    "(Tensor value, Tensor gate) -> Tensor",
    gated_values,
    lambda value, gate: value.new_empty(value.shape),
    _differentiate,
    save_inputs,
)
define(
    "triton_gated_backward",
    "(Tensor grad, Tensor value, Tensor gate) -> (Tensor, Tensor)",
    gated_gradients,
    lambda grad, value, gate: (value.new_empty(value.shape), gate.new_empty(gate.shape)),
)
