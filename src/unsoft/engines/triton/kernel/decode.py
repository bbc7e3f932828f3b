"""The kernels of one formula for few queries on many keys, which is decoding; its functions and constants
(codegen.py) and what sums.py defines are added to this module by source.py.

The rows of a tile are all queries of all query heads that share a key head, so keys and values are read once.
The keys are split among programs, whose sums a second kernel adds. Reading the keys is nearly all the work,
so the rules for NaN and Inf are followed at once.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.tiles import at_head, load_rows


@triton.jit
def decode_kernel(
    q,
    k,
    v,
    sums,
    tops,
    masses,
    extras,
    numbers,
    shape,
    chunk,
    FIXED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Sums over keys split * chunk .. (split + 1) * chunk: (B, Hk, splits, M, BV),
    and (B, Hk, splits, M) twice."""
    split, number = tl.program_id(0), tl.program_id(1)
    kv_heads = shape.heads // FIXED.group
    batch, hk = number // kv_heads, number % kv_heads
    # Rows beyond the last query of the last head repeat another one; nobody reads them.
    r = tl.arange(0, M)[:, None]
    h, local = hk * FIXED.group + r // shape.queries % FIXED.group, r % shape.queries
    head = head_of(extras, numbers, shape, batch * shape.heads + h, FIXED.double)
    rows = rows_at(head, 0, local, FIXED, True)
    columns_d, columns_v = tl.arange(0, FIXED.padded)[None, :], tl.arange(0, FIXED.value_padded)[None, :]
    of_heads = at_head(q, batch, h)
    queries = load_rows(of_heads, 0, local, shape.queries, columns_d, FIXED.width, FIXED.padded, True)
    begin, end = split * chunk, tl.minimum((split + 1) * chunk, shape.keys)
    k, v = at_head(k, batch, hk), at_head(v, batch, hk)
    acc, top, z, bad_rows, bad_sums = add_keys(
        no_sums(M, FIXED), begin, end, queries, rows, k, v, head, FIXED, N, True
    )
    acc = tl.where((bad_rows > 0) | (bad_sums > 0), float("nan"), acc)
    at = (number.to(tl.int64) * tl.num_programs(0) + split) * M + r
    tl.store(sums + at * FIXED.value_padded + columns_v, acc)
    tl.store(tops + at, top)
    tl.store(masses + at, z)


@triton.jit
def combine_kernel(
    sums,
    tops,
    masses,
    out,
    peaks,
    totals,
    extras,
    numbers,
    shape,
    splits,
    ROWS: tl.constexpr,
    FIXED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One row from the sums of its N or fewer splits; the tile of the first kernel had ROWS rows.

    Splits become more as the keys do: a kernel compiled for their number would be compiled again and again
    while decoding."""
    row, number = tl.program_id(0), tl.program_id(1)
    batch, h = number // shape.heads, number % shape.heads
    kv_heads = shape.heads // FIXED.group
    r = (h % FIXED.group) * shape.queries + row
    split, columns = tl.arange(0, N)[:, None], tl.arange(0, FIXED.value_padded)[None, :]
    at = ((batch * kv_heads + h // FIXED.group).to(tl.int64) * splits + split) * ROWS + r
    exists = split < splits
    part = tl.load(sums + at * FIXED.value_padded + columns, mask=exists, other=0.0)
    z = tl.load(masses + at, mask=exists, other=0.0)
    highest = tl.zeros((1, 1), z.dtype)
    if HAS_PEAK or UNDEFINED_ALONE:
        top = tl.load(tops + at, mask=exists, other=float("-inf"))
        highest = tl.max(top, 0)[:, None]
    if HAS_PEAK:
        part, z = lowered(part, z, top, peak_or_zero(highest))
    one = tl.zeros((1, 1), tl.int32)
    head = head_of(extras, numbers, shape, number, FIXED.double)
    rows = rows_at(head, row, one, FIXED, True)
    result, m, z = finished(tl.sum(part, 0)[None, :], highest, tl.sum(z, 0)[:, None], rows, head, FIXED)
    target = at_head(out, batch, h)
    place = target.pointer + row.to(tl.int64) * target.strides[2] + columns * target.strides[3] + one
    tl.store(place, result.to(out.pointer.dtype.element_ty), mask=columns < FIXED.value_width)
    tl.store(peaks + number.to(tl.int64) * shape.queries + row + one, m)
    tl.store(totals + number.to(tl.int64) * shape.queries + row + one, z)
