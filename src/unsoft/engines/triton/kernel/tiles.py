"""Tiles of tensors: addresses, loads, stores and visibility, shared by all kernels.

Index tensors carry their orientation: rows [M, 1] and keys [1, N] in forward and dq, rows [1, M] and keys [N,
1] in dk and dv; the functions here broadcast, so they serve both. The first row or key of a tile is a scalar
and offsets inside the tile are 32 bits wide, so that addresses take few registers. CHECK: the tile may cross
the diagonal or an edge of the matrix.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import is_finite, kept
from unsoft.engines.triton.structures import Extras, View


@triton.jit
def at_head(x, batch, head):
    """Return the part of a view that belongs to one head."""
    if x.pointer is None:
        return x
    else:
        return View(
            x.pointer + batch.to(tl.int64) * x.strides[0] + head.to(tl.int64) * x.strides[1], x.strides
        )


@triton.jit
def extras_at_head(extras, batch, head):
    """Return the optional tensors of one head."""
    return Extras(
        at_head(extras.visible, batch, head),
        at_head(extras.bias, batch, head),
        at_head(extras.counts, batch, head),
        at_head(extras.row_positions, batch, head),
        at_head(extras.key_positions, batch, head),
        at_head(extras.query_fields, batch, head),
        at_head(extras.key_fields, batch, head),
        extras.parameters,
        extras.seed,
    )


@triton.jit
def load_rows(
    x, start, local, limit, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr, CHECK: tl.constexpr
):
    """Load rows start + local of a matrix, in the orientation of the index tensors; 0 outside."""
    at = x.pointer + tl.cast(start, tl.int64) * x.strides[2] + (local * x.strides[2] + columns * x.strides[3])
    if CHECK and WIDTH != PADDED:
        return tl.load(at, mask=(local < limit - start) & (columns < WIDTH), other=0.0)
    elif CHECK:
        return tl.load(at, mask=local < limit - start, other=0.0)
    elif WIDTH != PADDED:
        return tl.load(at, mask=columns < WIDTH, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(x, start, local, limit, columns, tile, WIDTH: tl.constexpr):
    """Store a tile to rows start + local of a matrix, in the matrix's dtype."""
    at = x.pointer + tl.cast(start, tl.int64) * x.strides[2] + (local * x.strides[2] + columns * x.strides[3])
    tl.store(at, tile.to(x.pointer.dtype.element_ty), mask=(local < limit - start) & (columns < WIDTH))


@triton.jit
def load_entries(x, rows, keys, shape, CHECK: tl.constexpr):
    """Load a tile of a mask or bias; 0 outside."""
    start = tl.cast(rows.start, tl.int64) * x.strides[2] + tl.cast(keys.start, tl.int64) * x.strides[3]
    at = x.pointer + start + (rows.local * x.strides[2] + keys.local * x.strides[3])
    if CHECK:
        return tl.load(at, mask=inside(rows, keys, shape), other=0)
    else:
        return tl.load(at)


@triton.jit
def inside(rows, keys, shape):
    """Return a bool tile of the entries that lie inside the matrix."""
    return (rows.local < shape.queries - rows.start) & (keys.local < shape.keys - keys.start)


@triton.jit
def pointers(x, start, local):
    """Return pointers to the numbers of rows or keys start + local."""
    return x.pointer + tl.cast(start, tl.int64) * x.strides[2] + local * x.strides[2]


@triton.jit
def load_values(x, start, local, limit, other, CHECK: tl.constexpr):
    """Load one number per row or key; ``other`` without a tensor, and beyond its last row."""
    if x.pointer is None:
        return other
    else:
        at = pointers(x, start, local)
        if CHECK:
            return tl.load(at, mask=local < limit - start, other=other)
        else:
            return tl.load(at)


@triton.jit
def positions(x, start, local, offset, limit, DOUBLE: tl.constexpr, CHECK: tl.constexpr):
    """Return the symbol i or j: counted from ``offset``, or loaded if positions were passed."""
    if x.pointer is None:
        return (start + offset + local).to(tl.float64 if DOUBLE else tl.float32)
    else:
        return load_values(x, start, local, limit, 0.0, CHECK)


@triton.jit
def seen_entries(head, rows, keys, CAUSAL: tl.constexpr, CHECK: tl.constexpr):
    """Return a bool tile of the visible entries; None = all."""
    seen = None
    if CHECK:
        seen = inside(rows, keys, head.shape)
        if CAUSAL:
            seen = seen & (keys.local <= rows.local + (head.shape.offset + rows.start - keys.start))
    if head.extras.visible.pointer is not None:
        visible = load_entries(head.extras.visible, rows, keys, head.shape, CHECK) != 0
        if CHECK:
            seen = seen & visible
        else:
            seen = visible
    return seen


@triton.jit
def only(seen, tile, other):
    """Replace entries that are not visible by ``other``."""
    if seen is None:
        return tile
    else:
        return tl.where(seen, tile, other)


@triton.jit
def seen_keys(i0, shape, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return two numbers of keys: rows i0 .. i0 + M all see the keys before the first, and none of them sees
    a key from the second on."""
    end, whole = shape.keys, shape.keys
    if CAUSAL:
        end = tl.maximum(tl.minimum(end, i0 + M + shape.offset), 0)
        whole = tl.maximum(tl.minimum(whole, i0 + 1 + shape.offset), 0)
    if i0 + M > shape.queries:
        whole = 0
    return whole // N * N, end


@triton.jit
def survives(head, rows, keys):
    """Return a bool tile of the weights that dropout keeps."""
    return kept(
        head.extras.seed, head.threshold, head.number, rows.start + rows.local, keys.start + keys.local
    )


@triton.jit
def full_precision(high, low, DOUBLE: tl.constexpr):
    """Return a number that was passed as the sum of two float32."""
    if DOUBLE:
        return tl.cast(high, tl.float64) + tl.cast(low, tl.float64)
    else:
        return high


@triton.jit
def cleaned(tile, EXACT: tl.constexpr):
    """Replace NaN and Inf by 0 in exact kernels, which then mark the rows that see them."""
    if EXACT:
        return tl.where(is_finite(tile), tile, 0.0).to(tile.dtype)
    else:
        return tile


@triton.jit
def add_product(acc, left, right, GROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Return acc + left @ right, with ``left`` rounded to the dtype of ``right``.

    ``GROWS``: the rows of ``left`` may leave the range of float16; such rows are scaled by a power of two.
    """
    if GROWS and right.dtype == tl.float16:
        scale = row_scale(left)
        # 1 / scale of a power of two 2^e by its bits: the exponent field 127 + e becomes 254 - (127 + e).
        inverse = (254 * 0x800000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        return acc + scale * tl.dot((left * inverse).to(right.dtype), right, out_dtype=acc.dtype)
    else:
        return tl.dot(left.to(right.dtype), right, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def row_scale(tile):
    """Return a power of two >= 1 for each row [M, 1] of a float32 tile. Divided by it, entries are less than
    2**15; float16 ends at 65504.

    Small entries survive, too: the smallest float16 is 2**-39 of the largest entry of a scaled row.
    """
    largest = tl.max(tl.abs(tile), 1)[:, None]
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(power * 2.0**-14, 1.0), 2.0**112)  # Inf stays Inf after the division


@triton.jit
def any_bad(tile, AXIS: tl.constexpr):
    """Return True where there is NaN or Inf along the axis."""
    return tl.max((is_finite(tile) == 0).to(tl.int32), AXIS) > 0


@triton.jit
def must_run(flag, EXACT: tl.constexpr):
    """Return False for an exact kernel whose inputs have a finite sum: the fast kernel was right then."""
    if EXACT:
        return is_finite(tl.load(flag)) == 0
    else:
        return True


@triton.jit
def copy_kernel(x, y, SIZE: tl.constexpr):
    """Copy SIZE numbers: the smallest kernel, which shows whether Triton works at all."""
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at))
