"""Densities of keys inside the kernels of attention: rho_ij = sum over l <= i of exp(-|x_j - x_l|^2).

A block of M rows owns the M points with the numbers of its rows. With the densities of all keys among the
points before the block (``carry``, by ``densities_kernel``), the densities in its rows are those plus a
triangle times the similarities of its own points to the keys. The gradient goes the same way back: points of
a block get the gradients of its own rows inside the kernels of attention, and those of all later rows, summed
by key, from ``density_gradients_kernel``. Without causality all rows have the same densities.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import LOG2E
from unsoft.engines.triton.kernel.tiles import at_head, block_and_head, load_rows, load_values, store_rows
from unsoft.engines.triton.structures import KernelDensity, TilePoints


@triton.jit
def density_at(density, batch, h, FIXED: tl.constexpr):
    """Return the tensors of one head and its power; 0 in calls without densities."""
    if not FIXED.density:
        return 0.0
    else:
        hk = h // FIXED.group
        return KernelDensity(
            at_head(density.points, batch, hk),
            at_head(density.squares, batch, hk),
            at_head(density.carry, batch, hk),
            tl.load(density.power + h),
        )


@triton.jit
def load_points(density, start, limit, FIXED: tl.constexpr, SIZE: tl.constexpr):
    """Load SIZE points [SIZE, W] and their squares [SIZE, 1], Inf for those that do not count."""
    local, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, FIXED.point_padded)[None, :]
    x = load_rows(density.points, start, local, limit, columns, FIXED.point_width, FIXED.point_padded, True)
    return TilePoints(x, load_values(density.squares, start, local, limit, float("inf"), True))


@triton.jit
def similarities(a, b, FIXED: tl.constexpr):
    """Return exp(-|x - y|^2) [A, B] of two tiles of points."""
    product = tl.dot(a.x, tl.trans(b.x), input_precision=FIXED.point_precision, out_dtype=a.x.dtype)
    # Rounding may make the square of a small distance negative.
    square = tl.maximum(a.squares + tl.trans(b.squares) - 2.0 * product, 0.0)
    return tl.exp2(-square * LOG2E)


@triton.jit
def triangle(x, SIZE: tl.constexpr):
    """Return [SIZE, SIZE] in the dtype of ``x``: 1 on and below the diagonal."""
    i = tl.arange(0, SIZE)
    return (i[:, None] >= i[None, :]).to(x.dtype)


@triton.jit
def tile_densities(density, block, own, keys, j0, limit, FIXED: tl.constexpr):
    """Return the similarities [M, N] of a block's own points to keys, and the densities of the keys in its
    rows: [M, N], or [1, N] if rows do not differ."""
    row = tl.cast(block, tl.int64) * density.carry.strides[2] if FIXED.causal else 0
    at = tl.arange(0, FIXED.N)[None, :]
    rho = tl.load(density.carry.pointer + row + j0 + at, mask=at < limit - j0, other=1.0)
    similar = rho
    if FIXED.causal:
        similar = similarities(own, keys, FIXED)
        rho += tl.dot(
            triangle(similar, FIXED.M),
            similar,
            input_precision=FIXED.point_precision,
            out_dtype=similar.dtype,
        )
    # The density of a visible key is at least 1, since it counts itself.
    return similar, tl.where(rho > 0.5, rho, 1.0)


@triton.jit
def point_weights(d_rho, similar, FIXED: tl.constexpr):
    """Return the gradient of the logarithms of the similarities [M, N] from that of the densities: a point
    counts in its own row and the later ones of the block."""
    after = tl.trans(triangle(d_rho, FIXED.M))
    return similar * tl.dot(after, d_rho, input_precision=FIXED.point_precision, out_dtype=d_rho.dtype)


@triton.jit
def densities_kernel(density, out, shape, FIXED: tl.constexpr):
    """Write the densities of N keys among the points before every block of M rows, then among those of all
    rows; without causality the latter only. ``shape.heads``: key heads."""
    block, number = block_and_head(tl.cdiv(shape.keys, FIXED.N))
    batch, h, j0 = number // shape.heads, number % shape.heads, block * FIXED.N
    points, at = density_at_key_head(density, batch, h), tl.arange(0, FIXED.N)[None, :]
    keys = load_points(points, j0, shape.keys, FIXED, FIXED.N)
    sums = at_head(out, batch, h)
    total = tl.zeros((1, FIXED.N), keys.x.dtype)
    rows = shape.queries if FIXED.causal else shape.keys
    to, exists = sums.pointer + j0 + at, at < shape.keys - j0
    for step in tl.range(0, tl.cdiv(rows, FIXED.M)):
        if FIXED.causal:
            tl.store(to + tl.cast(step, tl.int64) * sums.strides[2], total, mask=exists)
        others = load_points(points, step * FIXED.M, rows, FIXED, FIXED.M)
        total += tl.sum(similarities(others, keys, FIXED), 0)[None, :]
    last = tl.cdiv(rows, FIXED.M) if FIXED.causal else 0
    tl.store(to + tl.cast(last, tl.int64) * sums.strides[2], total, mask=exists)


@triton.jit
def density_at_key_head(density, batch, hk):
    return KernelDensity(
        at_head(density.points, batch, hk), at_head(density.squares, batch, hk), density.carry, density.power
    )


@triton.jit
def density_gradients_kernel(density, later, out, shape, FIXED: tl.constexpr):
    """Add to the gradients of M points those of densities in rows after their own block, or of all rows.

    ``later`` (B, Hk, blocks, S): gradients of the densities of keys, summed over the rows after each block;
    one block without causality. A point counts once as one that is summed over, once as a key."""
    block, number = block_and_head(tl.cdiv(shape.keys, FIXED.M))
    batch, h, i0 = number // shape.heads, number % shape.heads, block * FIXED.M
    points, gradient = density_at_key_head(density, batch, h), at_head(later, batch, h)
    own = load_points(points, i0, shape.keys, FIXED, FIXED.M)
    i, j = tl.arange(0, FIXED.M)[:, None], tl.arange(0, FIXED.M)[None, :]
    dx, total = tl.zeros_like(own.x), tl.zeros((FIXED.M, 1), own.x.dtype)
    blocks = tl.cdiv(shape.queries, FIXED.M) if FIXED.causal else tl.cdiv(shape.keys, FIXED.M)
    for step in tl.range(0, tl.cdiv(shape.keys, FIXED.M)):
        j0 = step * FIXED.M
        others = load_points(points, j0, shape.keys, FIXED, FIXED.M)
        row_i, row_j = tl.cast(block, tl.int64), tl.cast(step, tl.int64)
        if not FIXED.causal:
            row_i, row_j = row_i * 0, row_j * 0
        # Points after the last row belong to no block.
        of_others = tl.where(block < blocks, shape.keys - j0, 0)
        of_own = tl.where(step < blocks, shape.keys - i0, 0)
        as_point = tl.load(
            gradient.pointer + row_i * gradient.strides[2] + j0 + j, mask=j < of_others, other=0.0
        )
        as_key = tl.load(gradient.pointer + row_j * gradient.strides[2] + i0 + i, mask=i < of_own, other=0.0)
        weights = (as_point + as_key) * similarities(own, others, FIXED)
        dx += tl.dot(weights, others.x, input_precision=FIXED.point_precision, out_dtype=dx.dtype)
        total += tl.sum(weights, 1)[:, None]
    columns, result = tl.arange(0, FIXED.point_padded)[None, :], at_head(out, batch, h)
    dx = 2.0 * (dx - own.x * total)
    dx += load_rows(result, i0, i, shape.keys, columns, FIXED.point_width, FIXED.point_padded, True)
    store_rows(result, i0, i, shape.keys, columns, dx, FIXED.point_width)
