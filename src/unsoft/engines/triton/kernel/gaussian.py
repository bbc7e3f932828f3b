"""Gaussian matrices Z_ij = exp(-|x_i - y_j|^2) in tiles of M rows and N columns: building, products,
gradients of points. Also the product of values and the gate of their key, with both gradients in one pass.

Distances are sums of squared differences: |x|^2 + |y|^2 - 2 x y would lose all digits of points that nearly
coincide. So points are passed twice, by coordinate (systems, d, n) for distances, and by point (systems, n,
d).
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import is_finite
from unsoft.engines.triton.kernel.tiles import at_head, load_rows, load_values, store_rows


@triton.jit
def similar(x, y, present, i, j, shape):
    """Compute a tile of Z from coordinates; rows and columns of absent points are 0."""
    squares = tl.zeros((i.shape[0], j.shape[0]), x.dtype.element_ty)
    for c in tl.range(0, shape.width):
        a = tl.load(x + c * shape.rows + i, mask=i < shape.rows, other=0.0)
        b = tl.load(y + c * shape.columns + j, mask=j < shape.columns, other=0.0)
        difference = a[:, None] - b[None, :]
        squares += difference * difference
    tile = tl.exp(-squares)
    if present is not None:
        tile *= tl.load(present + i, mask=i < shape.rows, other=0.0)[:, None]
        tile *= tl.load(present + j, mask=j < shape.columns, other=0.0)[None, :]
    return tile


@triton.jit
def tile_at(x, y, present, matrix, i, j, shape, FIXED: tl.constexpr):
    """Load a tile of Z if it is stored, compute it otherwise."""
    if FIXED.stored:
        inside = (i < shape.rows)[:, None] & (j < shape.columns)[None, :]
        at = i.to(tl.int64)[:, None] * shape.columns + j[None, :]
        return tl.load(matrix + at, mask=inside, other=0.0)
    else:
        return similar(x, y, present, i, j, shape)


@triton.jit
def at_system(pointer, system, size):
    """Return a pointer to the part of a tensor that belongs to one system."""
    if pointer is None:
        return pointer
    else:
        return pointer + system.to(tl.int64) * size


@triton.jit
def coordinates_at(x, i, c, shape):
    """Return pointers to coordinates ``c`` of points ``i``."""
    return x + i[:, None] * shape.width + c[None, :]


@triton.jit
def gaussian_product_kernel(x, y, present, matrix, vector, result, shape, FIXED: tl.constexpr):
    """Write some rows and one part of the columns of Z to ``matrix`` (unless it is None or already holds
    them), and multiply them by ``vector`` (unless it is None). ``result``: (systems, parts, rows)."""
    block, system = tl.program_id(0) // shape.parts, tl.program_id(1)
    part = tl.program_id(0) % shape.parts
    x = at_system(x, system, shape.width * shape.rows)
    y = at_system(y, system, shape.width * shape.columns)
    present = at_system(present, system, shape.rows)
    vector = at_system(vector, system, shape.columns)
    matrix = at_system(matrix, system, tl.cast(shape.rows, tl.int64) * shape.columns)
    i = block * FIXED.M + tl.arange(0, FIXED.M)
    total = tl.zeros((FIXED.M,), x.dtype.element_ty)
    for start in tl.range(part * shape.span, tl.minimum((part + 1) * shape.span, shape.columns), FIXED.N):
        j = start + tl.arange(0, FIXED.N)
        tile = tile_at(x, y, present, matrix, i, j, shape, FIXED)
        if matrix is not None and not FIXED.stored:
            at = matrix + i.to(tl.int64)[:, None] * shape.columns + j[None, :]
            tl.store(at, tile, mask=(i < shape.rows)[:, None] & (j < shape.columns)[None, :])
        if vector is not None:
            numbers = tl.load(vector + j, mask=j < shape.columns, other=0.0)
            total += tl.sum(tile * numbers[None, :], 1)
    if vector is not None:
        at = (system.to(tl.int64) * shape.parts + part) * shape.rows + i
        tl.store(result + at, total, mask=i < shape.rows)


@triton.jit
def gaussian_gradient_kernel(x, points, present, matrix, u, v, result, rank, shape, FIXED: tl.constexpr):
    """Write the gradient of sum_r u_r Z v_r for some points and coordinates, where rows and columns of Z are
    the same points: 2 sum_l w_jl (x_l - x_j) with w = Z times the sum of u v^T + v u^T."""
    REAL: tl.constexpr = x.dtype.element_ty
    blocks = tl.cdiv(shape.width, FIXED.coordinates)
    block, system = tl.program_id(0) // blocks, tl.program_id(1)
    c = tl.program_id(0) % blocks * FIXED.coordinates + tl.arange(0, FIXED.coordinates)
    x = at_system(x, system, shape.width * shape.rows)
    points = at_system(points, system, shape.width * shape.rows)
    present = at_system(present, system, shape.rows)
    matrix = at_system(matrix, system, tl.cast(shape.rows, tl.int64) * shape.columns)
    u, v = at_system(u, system, rank * shape.rows), at_system(v, system, rank * shape.rows)
    result = at_system(result, system, shape.width * shape.rows)
    i = block * FIXED.M + tl.arange(0, FIXED.M)
    inside = (i < shape.rows)[:, None] & (c < shape.width)[None, :]
    own = tl.load(coordinates_at(points, i, c, shape), mask=inside, other=0.0)
    pulled, total = tl.zeros((FIXED.M, FIXED.coordinates), REAL), tl.zeros((FIXED.M, 1), REAL)
    for start in tl.range(0, shape.columns, FIXED.N):
        j = start + tl.arange(0, FIXED.N)
        slope = tl.zeros((FIXED.M, FIXED.N), REAL)
        for r in tl.range(0, rank):
            row_u = tl.load(u + r * shape.rows + i, mask=i < shape.rows, other=0.0)[:, None]
            row_v = tl.load(v + r * shape.rows + i, mask=i < shape.rows, other=0.0)[:, None]
            column_u = tl.load(u + r * shape.rows + j, mask=j < shape.rows, other=0.0)[None, :]
            column_v = tl.load(v + r * shape.rows + j, mask=j < shape.rows, other=0.0)[None, :]
            slope += row_u * column_v + row_v * column_u
        w = tile_at(x, x, present, matrix, i, j, shape, FIXED) * slope
        w = tl.where(i[:, None] == j[None, :], 0.0, w)  # a point has no distance from itself
        in_columns = (j < shape.columns)[:, None] & (c < shape.width)[None, :]
        others = tl.load(coordinates_at(points, j, c, shape), mask=in_columns, other=0.0)
        pulled = tl.dot(w, others, pulled, input_precision=FIXED.precision, out_dtype=REAL)
        total += tl.sum(w, 1)[:, None]
    tl.store(coordinates_at(result, i, c, shape), 2 * (pulled - total * own), mask=inside)


@triton.jit
def gating_kernel(values, gates, grad, out, d_gates, shape, FIXED: tl.constexpr):
    """Write values times gates of M keys of a head; with ``grad``, the gradients of the values (``out``) and
    of the gates (``d_gates``), to which a value that is not finite adds nothing."""
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    PADDED: tl.constexpr = -(-FIXED.width // FIXED.N) * FIXED.N
    batch, h = tl.program_id(1) // shape.heads, tl.program_id(1) % shape.heads
    t0, a = tl.program_id(0) * FIXED.M, tl.arange(0, FIXED.M)[:, None]
    gate = load_values(at_head(gates, batch, h), t0, a, shape.tokens, 0.0, True).to(REAL)
    values, out = at_head(values, batch, h), at_head(out, batch, h)
    slope = tl.zeros((FIXED.M, 1), REAL)
    for start in tl.range(0, FIXED.width, FIXED.N):
        c = start + tl.arange(0, FIXED.N)[None, :]
        tile = load_rows(values, t0, a, shape.tokens, c, FIXED.width, PADDED, True).to(REAL)
        if grad.pointer is not None:
            grad_h = at_head(grad, batch, h)
            above = load_rows(grad_h, t0, a, shape.tokens, c, FIXED.width, PADDED, True).to(REAL)
            slope += tl.sum(tl.where(is_finite(tile), tile, 0.0) * above, 1)[:, None]
            tile = above
        store_rows(out, t0, a, shape.tokens, c, tile * gate, FIXED.width)
    if d_gates is not None:
        at = d_gates + tl.program_id(1).to(tl.int64) * shape.tokens + t0 + a
        tl.store(at, slope, mask=a < shape.tokens - t0)
