"""Gaussian matrices Z_jl = exp(-|x_i - y_j|^2) in tiles of M rows and N columns: built, multiplied, and the
gradient of points.

Distances are sums of squared differences: |x|^2 + |y|^2 - 2 x y would lose all digits of points that nearly
coincide. So points come twice, by coordinate (systems, d, n) for distances, and by point (systems, n, d).
"""

import triton
import triton.language as tl


@triton.jit
def similar(x, y, present, i, j, shape):
    """A tile of Z, from coordinates; rows and columns of points that are absent are 0."""
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
    """A tile of Z, read where it is stored."""
    if FIXED.stored:
        inside = (i < shape.rows)[:, None] & (j < shape.columns)[None, :]
        at = i.to(tl.int64)[:, None] * shape.columns + j[None, :]
        return tl.load(matrix + at, mask=inside, other=0.0)
    else:
        return similar(x, y, present, i, j, shape)


@triton.jit
def of_system(pointer, system, size):
    """The part of a tensor that belongs to one system."""
    if pointer is None:
        return pointer
    else:
        return pointer + system.to(tl.int64) * size


@triton.jit
def product_kernel(
    x,
    y,
    present,
    matrix,
    vector,
    result,
    shape,
    FIXED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Some rows of Z and the columns of one of the parts they are cut into: written to ``matrix``, unless
    they come from it or there is none, and multiplied with ``vector``, if there is one. ``result``:
    (systems, parts, rows)."""
    block, system = tl.program_id(0) // shape.parts, tl.program_id(1)
    part = tl.program_id(0) % shape.parts
    x = of_system(x, system, shape.width * shape.rows)
    y = of_system(y, system, shape.width * shape.columns)
    present = of_system(present, system, shape.rows)
    vector = of_system(vector, system, shape.columns)
    matrix = of_system(matrix, system, tl.cast(shape.rows, tl.int64) * shape.columns)
    i = block * M + tl.arange(0, M)
    total = tl.zeros((M,), x.dtype.element_ty)
    for start in tl.range(part * shape.span, tl.minimum((part + 1) * shape.span, shape.columns), N):
        j = start + tl.arange(0, N)
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
def gradient_kernel(
    x,
    points,
    present,
    matrix,
    u,
    v,
    result,
    rank,
    shape,
    FIXED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """The gradient of sum_r u_r Z v_r on some points and some coordinates, from Z within a set:
    2 sum_l w_jl (x_l - x_j) with w = Z times the sum of u v^T + v u^T."""
    REAL: tl.constexpr = x.dtype.element_ty
    blocks = tl.cdiv(shape.width, FIXED.coordinates)
    block, system = tl.program_id(0) // blocks, tl.program_id(1)
    c = tl.program_id(0) % blocks * FIXED.coordinates + tl.arange(0, FIXED.coordinates)
    x = of_system(x, system, shape.width * shape.rows)
    points = of_system(points, system, shape.width * shape.rows)
    present = of_system(present, system, shape.rows)
    matrix = of_system(matrix, system, tl.cast(shape.rows, tl.int64) * shape.columns)
    u, v = of_system(u, system, rank * shape.rows), of_system(v, system, rank * shape.rows)
    result = of_system(result, system, shape.width * shape.rows)
    i = block * M + tl.arange(0, M)
    own = tl.load(
        points + i[:, None] * shape.width + c[None, :],
        mask=(i < shape.rows)[:, None] & (c < shape.width)[None, :],
        other=0.0,
    )
    pulled, total = tl.zeros((M, FIXED.coordinates), REAL), tl.zeros((M, 1), REAL)
    for start in tl.range(0, shape.columns, N):
        j = start + tl.arange(0, N)
        slope = tl.zeros((M, N), REAL)
        for r in tl.range(0, rank):
            row_u = tl.load(u + r * shape.rows + i, mask=i < shape.rows, other=0.0)[:, None]
            row_v = tl.load(v + r * shape.rows + i, mask=i < shape.rows, other=0.0)[:, None]
            column_u = tl.load(u + r * shape.rows + j, mask=j < shape.rows, other=0.0)[None, :]
            column_v = tl.load(v + r * shape.rows + j, mask=j < shape.rows, other=0.0)[None, :]
            slope += row_u * column_v + row_v * column_u
        w = tile_at(x, x, present, matrix, i, j, shape, FIXED) * slope
        w = tl.where(i[:, None] == j[None, :], 0.0, w)  # a point has no distance from itself
        others = tl.load(
            points + j[:, None] * shape.width + c[None, :],
            mask=(j < shape.columns)[:, None] & (c < shape.width)[None, :],
            other=0.0,
        )
        pulled = tl.dot(w, others, pulled, input_precision=FIXED.precision, out_dtype=REAL)
        total += tl.sum(w, 1)[:, None]
    tl.store(
        result + i[:, None] * shape.width + c[None, :],
        2 * (pulled - total * own),
        mask=(i < shape.rows)[:, None] & (c < shape.width)[None, :],
    )
