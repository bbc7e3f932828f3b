"""Tiles of tensors, and which of their entries count.

Index tensors carry their orientation: rows [M, 1] and keys [1, N] in forward and dq, rows [1, M] and keys [N,
1] in dk and dv; what is here broadcasts and does not care. The first row or key of a tile is a scalar and
what varies inside it 32 bits wide, so that addresses take few registers. CHECK: the tile may cross the
diagonal or an edge of the matrix.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import is_finite, kept
from unsoft.engines.triton.kernel.structures import Extras, View


@triton.jit
def at_head(x, batch, head):
    """The part of a view that belongs to one head."""
    if x.pointer is None:
        return x
    else:
        return View(
            x.pointer + batch.to(tl.int64) * x.strides[0] + head.to(tl.int64) * x.strides[1], x.strides
        )


@triton.jit
def extras_at_head(extras, batch, head):
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
    """Rows start + local of a matrix, in the orientation of the index tensors; 0 outside."""
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
    at = x.pointer + tl.cast(start, tl.int64) * x.strides[2] + (local * x.strides[2] + columns * x.strides[3])
    tl.store(at, tile.to(x.pointer.dtype.element_ty), mask=(local < limit - start) & (columns < WIDTH))


@triton.jit
def load_entries(x, rows, keys, shape, CHECK: tl.constexpr):
    """A tile of a mask or bias; 0 outside."""
    start = tl.cast(rows.start, tl.int64) * x.strides[2] + tl.cast(keys.start, tl.int64) * x.strides[3]
    at = x.pointer + start + (rows.local * x.strides[2] + keys.local * x.strides[3])
    if CHECK:
        return tl.load(at, mask=inside(rows, keys, shape), other=0)
    else:
        return tl.load(at)


@triton.jit
def inside(rows, keys, shape):
    """Entries of a tile that are entries of the matrix."""
    return (rows.local < shape.queries - rows.start) & (keys.local < shape.keys - keys.start)


@triton.jit
def places(x, start, local):
    """Where the numbers of some rows or keys are."""
    return x.pointer + tl.cast(start, tl.int64) * x.strides[2] + local * x.strides[2]


@triton.jit
def load_values(x, start, local, limit, other, CHECK: tl.constexpr):
    """One number for each of some rows or keys; ``other`` where there is no tensor, or no such row."""
    if x.pointer is None:
        return other
    else:
        at = places(x, start, local)
        if CHECK:
            return tl.load(at, mask=local < limit - start, other=other)
        else:
            return tl.load(at)


@triton.jit
def positions(x, start, local, offset, limit, DOUBLE: tl.constexpr, CHECK: tl.constexpr):
    """The symbols i or j: counted from ``offset``, or read."""
    if x.pointer is None:
        return (start + offset + local).to(tl.float64 if DOUBLE else tl.float32)
    else:
        return load_values(x, start, local, limit, 0.0, CHECK)


@triton.jit
def seen_entries(head, rows, keys, CAUSAL: tl.constexpr, CHECK: tl.constexpr):
    """Which entries of a tile count; None = all."""
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
    """The tile with ``other`` in place of the entries that do not count."""
    if seen is None:
        return tile
    else:
        return tl.where(seen, tile, other)


@triton.jit
def seen_keys(i0, shape, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Keys before the first number are visible to all rows i0 .. i0 + M, keys from the second on to none."""
    end, whole = shape.keys, shape.keys
    if CAUSAL:
        end = tl.maximum(tl.minimum(end, i0 + M + shape.offset), 0)
        whole = tl.maximum(tl.minimum(whole, i0 + 1 + shape.offset), 0)
    if i0 + M > shape.queries:
        whole = 0
    return whole // N * N, end


@triton.jit
def survives(head, rows, keys):
    """Which weights of a tile dropout keeps."""
    return kept(
        head.extras.seed, head.threshold, head.number, rows.start + rows.local, keys.start + keys.local
    )


@triton.jit
def full_precision(high, low, DOUBLE: tl.constexpr):
    """A number that came as two of float32."""
    if DOUBLE:
        return tl.cast(high, tl.float64) + tl.cast(low, tl.float64)
    else:
        return high


@triton.jit
def cleaned(tile, EXACT: tl.constexpr):
    """By the rules for NaN and Inf such an entry counts as 0."""
    if EXACT:
        return tl.where(is_finite(tile), tile, 0.0).to(tile.dtype)
    else:
        return tile


@triton.jit
def add_product(acc, left, right, GROWS: tl.constexpr, PRECISION: tl.constexpr):
    """acc + left @ right, with ``left`` rounded to the dtype of ``right``.

    ``GROWS``: the rows of ``left`` may leave the range of float16; such rows are scaled by a power of two.
    """
    if GROWS and right.dtype == tl.float16:
        scale = row_scale(left)
        inverse = (254 * 0x800000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        return acc + scale * tl.dot((left * inverse).to(right.dtype), right, out_dtype=acc.dtype)
    else:
        return tl.dot(left.to(right.dtype), right, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def row_scale(tile):
    """A power of two for each row [M, 1] of a float32 tile, at least 1, by which its entries are divided to
    be less than 2**15; float16 ends at 65504.

    Numbers below are kept, too: the smallest float16 is 2**-39 of the largest of a scaled row.
    """
    largest = tl.max(tl.abs(tile), 1)[:, None]
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(power * 2.0**-14, 1.0), 2.0**112)  # Inf stays Inf after the division


@triton.jit
def any_bad(tile, AXIS: tl.constexpr):
    """Is there NaN or Inf along the axis?"""
    return tl.max((is_finite(tile) == 0).to(tl.int32), AXIS) > 0


@triton.jit
def must_run(flag, EXACT: tl.constexpr):
    """A kernel that follows the rules for NaN and Inf runs only if the sum of all inputs is not finite."""
    if EXACT:
        return is_finite(tl.load(flag)) == 0
    else:
        return True
