"""The kernels of one formula for few queries on many keys, which is decoding;
source.py adds its functions and constants.

The rows of a tile are all queries of all query heads that share a key head, so keys and values are read once.
The keys are split among programs, whose sums a second kernel adds. Reading the keys is nearly all the work,
so the rules for NaN and Inf are followed at once.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import LOG2E, is_finite, kept
from unsoft.engines.triton.kernel.tiles import at_head, cleaned, full_precision, load_rows, positions


@triton.jit
def load_of_heads(x, batch, heads, rows, columns, mask, other):
    """Entries of a tensor whose rows belong to different heads."""
    at = batch.to(tl.int64) * x.strides[0] + heads.to(tl.int64) * x.strides[1]
    if len(x.strides) == 4:
        at = at + rows.to(tl.int64) * x.strides[2] + columns * x.strides[3]
    else:
        at = at + rows.to(tl.int64) * x.strides[2]
    return tl.load(x.pointer + at, mask=mask, other=other)


@triton.jit
def any_bad(tile, AXIS: tl.constexpr):
    return tl.max((is_finite(tile) == 0).to(tl.int32), AXIS) > 0


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
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    split, number = tl.program_id(0), tl.program_id(1)
    kv_heads = shape.heads // FIXED.group
    batch, hk = number // kv_heads, number % kv_heads
    r, local = tl.arange(0, M)[:, None], tl.arange(0, N)
    exists = r < FIXED.group * shape.queries
    heads = tl.minimum(hk * FIXED.group + r // shape.queries, shape.heads - 1)
    row = r % shape.queries
    p = parameters(extras.parameters, shape.heads, heads)
    n = tl.full((M, 1), 1.0, REAL)
    if extras.counts.pointer is not None:
        n = load_of_heads(extras.counts, batch, heads, row, 0, exists, 1.0)
    i = (row + shape.offset).to(REAL)
    if extras.row_positions.pointer is not None:
        i = load_of_heads(extras.row_positions, batch, heads, row, 0, exists, 0.0)
    columns_d, columns_v = tl.arange(0, FIXED.padded)[None, :], tl.arange(0, FIXED.value_padded)[None, :]
    queries = load_of_heads(q, batch, heads, row, columns_d, exists & (columns_d < FIXED.width), 0.0)
    clean, scale = cleaned(queries, True), full_precision(numbers.scale, numbers.scale_low, FIXED.double)
    k, v = at_head(k, batch, hk), at_head(v, batch, hk)
    key_positions = at_head(extras.key_positions, batch, hk)
    acc, top = tl.zeros((M, FIXED.value_padded), REAL), tl.full((M, 1), float("-inf"), REAL)
    z, bad_rows = tl.zeros((M, 1), REAL), tl.zeros((M, 1), tl.int32)
    bad_sums = tl.zeros((M, FIXED.value_padded), tl.float32)
    keys = local[None, :]
    for j0 in tl.range(split * chunk, tl.minimum((split + 1) * chunk, shape.keys), N):
        raw_keys = load_rows(k, j0, keys, shape.keys, tl.trans(columns_d), FIXED.width, FIXED.padded, True)
        s = tl.dot(clean, cleaned(raw_keys, True), input_precision=FIXED.precision, out_dtype=REAL) * scale
        seen = exists & (keys < shape.keys - j0)
        if FIXED.causal:
            seen = seen & (keys <= row + (shape.offset - j0))
        if extras.visible.pointer is not None:
            seen = seen & (load_of_heads(extras.visible, batch, heads, row, j0 + keys, seen, 0) != 0)
        bad = any_bad(queries, 1)[:, None] | any_bad(raw_keys, 0)[None, :]
        b = 0.0
        if extras.bias.pointer is not None:
            raw_bias = load_of_heads(extras.bias, batch, heads, row, j0 + keys, seen, 0.0)
            bad = bad | (is_finite(raw_bias) == 0)
            b = cleaned(raw_bias, True)
            if not BIAS_IN_FORMULA:
                s += b
        j = positions(key_positions, j0, keys, 0, shape.keys, FIXED.double, True)
        m = 0.0
        if HAS_PEAK:
            peaks = tl.where(seen, peak(s, 0.0, n, i, j, b, p), float("-inf"))
            new = tl.maximum(top, tl.max(peaks, 1)[:, None])
            m = tl.where(new == float("-inf"), 0.0, new)
            drop = (top - m) * LOG2E
            acc = acc * tl.exp2(drop)
            z = z * tl.exp2(drop * DEGREE)
            top = new
        weight, mass = value(s, m, n, i, j, b, p)
        z += tl.sum(tl.where(seen, mass, 0.0), 1)[:, None]
        keep = seen
        if extras.seed is not None:
            keep = seen & kept(extras.seed, numbers.threshold, batch * shape.heads + heads, row, j0 + keys)
        raw_values = load_rows(
            v, j0, local[:, None], shape.keys, columns_v, FIXED.value_width, FIXED.value_padded, True
        )
        weight = tl.where(keep, weight, 0.0).to(raw_values.dtype)
        acc = tl.dot(weight, cleaned(raw_values, True), acc, input_precision=FIXED.precision, out_dtype=REAL)
        bad_rows = tl.maximum(bad_rows, tl.max((seen & bad).to(tl.int32), 1)[:, None])
        bad_sums = tl.dot(seen.to(tl.float16), (is_finite(raw_values) == 0).to(tl.float16), bad_sums)
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
    ROWS: tl.constexpr,
    FIXED: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One row from the sums of its N or fewer splits; the tile of the first kernel had ROWS rows."""
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    row, number = tl.program_id(0), tl.program_id(1)
    batch, h = number // shape.heads, number % shape.heads
    kv_heads = shape.heads // FIXED.group
    r = (h % FIXED.group) * shape.queries + row
    split, columns = tl.arange(0, N)[:, None], tl.arange(0, FIXED.value_padded)[None, :]
    at = ((batch * kv_heads + h // FIXED.group).to(tl.int64) * SPLITS + split) * ROWS + r
    exists = split < SPLITS
    part = tl.load(sums + at * FIXED.value_padded + columns, mask=exists, other=0.0)
    z = tl.load(masses + at, mask=exists, other=0.0)
    m = tl.zeros((1, 1), REAL)
    if HAS_PEAK:
        top = tl.load(tops + at, mask=exists, other=float("-inf"))
        highest = tl.max(top, 0)[:, None]
        m = tl.where(highest == float("-inf"), 0.0, highest)
        drop = (top - m) * LOG2E
        part, z = part * tl.exp2(drop), z * tl.exp2(drop * DEGREE)
    acc, z = tl.sum(part, 0)[None, :], tl.sum(z, 0)[:, None]
    p = parameters(extras.parameters, shape.heads, h)
    n = tl.full((1, 1), 1.0, REAL)
    if extras.counts.pointer is not None:
        n += tl.load(at_head(extras.counts, batch, h).pointer + row * extras.counts.strides[2]) - 1.0
    i = tl.zeros((1, 1), REAL) + (row + shape.offset).to(REAL)
    if extras.row_positions.pointer is not None:
        place = at_head(extras.row_positions, batch, h)
        i = tl.zeros((1, 1), REAL) + tl.load(place.pointer + row * place.strides[2])
    rescale = tl.zeros((1, 1), REAL) + factor(m, n, i, p)
    if HAS_MASS:
        z += offset_mass(m, n, i, p)
        size = norm(m, n, i, z, p)
        TINY: tl.constexpr = 2.2250738585072014e-308 if FIXED.double else 1.1754943508222875e-38
        gone = tl.abs(size) < TINY
        rescale = tl.where(gone, 0.0, rescale / tl.where(gone, 1.0, size))
    else:
        z = tl.zeros((1, 1), REAL) + 1.0
    keep_factor = full_precision(numbers.keep_factor, numbers.keep_factor_low, FIXED.double)
    result = acc * (rescale * keep_factor)
    one = tl.arange(0, 1)[:, None]
    target = at_head(out, batch, h)
    place = target.pointer + row.to(tl.int64) * target.strides[2] + columns * target.strides[3] + one
    tl.store(place, result.to(out.pointer.dtype.element_ty), mask=columns < FIXED.value_width)
    tl.store(peaks + number.to(tl.int64) * shape.queries + row + one, m)
    tl.store(totals + number.to(tl.int64) * shape.queries + row + one, z)
