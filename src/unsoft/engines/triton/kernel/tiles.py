"""Tiles of tensors: addresses, loads, stores and visibility, shared by all kernels.

Index tensors carry their orientation: rows [M, 1] and keys [1, N] in forward and dq, rows [1, M] and keys [N,
1] in dk and dv; the functions here broadcast, so they serve both. The first row or key of a tile is a scalar
and offsets inside the tile are 32 bits wide, so that addresses take few registers. CHECK: the tile may cross
the diagonal or an edge of the matrix.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import is_finite, kept
from unsoft.engines.triton.structures import Extras, KernelRows, Keys, View, Walk


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
        at_head(extras.spans, batch, head),
        at_head(extras.key_spans, batch, head),
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
def load_span(x, start, local, limit):
    """Load the spans of rows or keys, empty beyond the last one; (None, None) without spans."""
    if x.pointer is None:
        return None, None
    else:
        at, mask = pointers(x, start, local), local < limit - start
        return tl.load(at, mask=mask, other=0), tl.load(at + x.strides[3], mask=mask, other=0)


@triton.jit
def seen_entries(visible_entries, shape, rows, keys, CAUSAL: tl.constexpr, CHECK: tl.constexpr):
    """Return a bool tile of the visible entries; None = all. ``visible_entries``: the mask of the head."""
    seen = None
    if CHECK:
        seen = inside(rows, keys, shape)
        if CAUSAL:
            seen = seen & (keys.local <= rows.local + (shape.offset + rows.start - keys.start))
        if rows.first is not None:
            j = keys.start + keys.local
            seen = seen & (j >= rows.first) & (j < rows.last)
        elif keys.first is not None:
            i = rows.start + rows.local
            seen = seen & (i >= keys.first) & (i < keys.last)
    if visible_entries.pointer is not None:
        visible = load_entries(visible_entries, rows, keys, shape, CHECK) != 0
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
def in_spans(first, last, limit, SIZE: tl.constexpr):
    """Return the tiles of SIZE rows or keys, of ``limit`` in all, that the spans of a block touch."""
    some = first < last
    begin, end = tl.min(tl.where(some, first, limit)) // SIZE, tl.cdiv(tl.max(tl.where(some, last, 0)), SIZE)
    end = tl.maximum(begin, end)
    whole = tl.minimum(tl.maximum(tl.cdiv(tl.max(first), SIZE), begin), end)
    checked = tl.minimum(tl.maximum(tl.min(last) // SIZE, whole), end)
    return Walk(begin, whole, checked, end, None)


@triton.jit
def tiles_of_rows(i0, rows, shape, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return the tiles of N keys that rows i0 .. i0 + M visit."""
    if rows.first is not None:
        return in_spans(rows.first, rows.last, shape.keys, N)
    else:
        end, checked = shape.keys, shape.keys
        if CAUSAL:
            end = tl.maximum(tl.minimum(end, i0 + M + shape.offset), 0)
            checked = tl.maximum(tl.minimum(checked, i0 + 1 + shape.offset), 0)
        if i0 + M > shape.queries:
            checked = 0
        return Walk(0, 0, checked // N, tl.cdiv(end, N), None)


@triton.jit
def tiles_of_keys(j0, keys, shape, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return the tiles of M rows that keys j0 .. j0 + N visit."""
    if keys.first is not None:
        return in_spans(keys.first, keys.last, shape.queries, M)
    else:
        begin, whole, checked, end = 0, 0, shape.queries // M, tl.cdiv(shape.queries, M)
        if CAUSAL:
            begin = tl.minimum(tl.maximum(j0 - shape.offset, 0) // M, end)
            whole = tl.cdiv(tl.maximum(j0 + N - 1 - shape.offset, 0), M)
            whole = tl.minimum(tl.maximum(whole, begin), end)
        if j0 + N > shape.keys:
            whole = end
        return Walk(begin, whole, tl.maximum(checked, whole), end, None)


@triton.jit
def listed(walk, lists, block):
    """Return the walk over the tiles that a mask leaves to a block of rows or keys, if it was listed."""
    if lists.pointer is None:
        return walk
    else:
        at = lists.pointer + block.to(tl.int64) * lists.strides[2]
        return Walk(0, 0, 0, tl.load(at), at + 1)


@triton.jit
def steps(walk, CHECK: tl.constexpr, EXACT: tl.constexpr):
    """Return begin and end of the loop over the tiles that need checks, or over the others. Exact kernels
    check all."""
    if EXACT:
        return walk.begin, walk.end
    elif CHECK:
        return walk.begin, walk.end - (walk.checked - walk.whole)
    else:
        return walk.whole, walk.checked


@triton.jit
def tile_number(walk, step, CHECK: tl.constexpr, EXACT: tl.constexpr):
    """Return the number of the tile at a step of the loop."""
    if walk.listed is not None:
        return tl.load(walk.listed + step)
    elif CHECK and not EXACT:
        return tl.where(step >= walk.whole, step + (walk.checked - walk.whole), step)
    else:
        return step


@triton.jit
def block_and_head(blocks):
    """Return the block and the head of a program. All are in the first dimension of the grid, the only one
    that may have more than 65535 programs; those of one head are neighbours."""
    return tl.program_id(0) % blocks, tl.program_id(0) // blocks


@triton.jit
def visible_tiles_kernel(visible, spans, shape, lists, FIXED: tl.constexpr):
    """Write how many tiles of a block of M rows (or N keys: FIXED.of_keys) have a visible entry, then their
    numbers. ``shape.heads``: of the mask; ``spans``: of rows, or of keys."""
    blocks = tl.cdiv(shape.keys, FIXED.N) if FIXED.of_keys else tl.cdiv(shape.queries, FIXED.M)
    block, number = block_and_head(blocks)
    batch, h = number // shape.heads, number % shape.heads
    mask, own = at_head(visible, batch, h), at_head(spans, batch, h)
    i, j = tl.arange(0, FIXED.M)[:, None], tl.arange(0, FIXED.N)[None, :]
    if FIXED.of_keys:
        first, last = load_span(own, block * FIXED.N, j, shape.keys)
        keys = Keys(block * FIXED.N, j, 0.0, 0.0, first, last)
        walk = tiles_of_keys(block * FIXED.N, keys, shape, FIXED.causal, FIXED.M, FIXED.N)
    else:
        first, last = load_span(own, block * FIXED.M, i, shape.queries)
        rows = KernelRows(block * FIXED.M, i, 1.0, 0.0, 0.0, first, last, 0.0, 1.0, 0.0)
        walk = tiles_of_rows(block * FIXED.M, rows, shape, FIXED.causal, FIXED.M, FIXED.N)
    out = at_head(lists, batch, h)
    at, count = out.pointer + block.to(tl.int64) * out.strides[2], 0
    for tile in tl.range(walk.begin, walk.end):
        if FIXED.of_keys:
            others = KernelRows(tile * FIXED.M, i, 1.0, 0.0, 0.0, None, None, 0.0, 1.0, 0.0)
            seen = seen_entries(mask, shape, others, keys, FIXED.causal, True)
        else:
            others = Keys(tile * FIXED.N, j, 0.0, 0.0, None, None)
            seen = seen_entries(mask, shape, rows, others, FIXED.causal, True)
        some = tl.max(tl.max(seen.to(tl.int32), 1), 0)
        tl.store(at + 1 + count, tile, mask=some > 0)
        count += some
    tl.store(at, count)


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
def must_run(flag, FIXED: tl.constexpr):
    """Return False for an exact kernel whose inputs have a finite sum: the fast kernel was right then."""
    if FIXED.exact:
        return is_finite(tl.sum(tl.load(flag + tl.arange(0, FIXED.parts)))) == 0
    else:
        return True


@triton.jit
def copy_kernel(x, y, SIZE: tl.constexpr):
    """Copy SIZE numbers: the smallest kernel, which shows whether Triton works at all."""
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at))
