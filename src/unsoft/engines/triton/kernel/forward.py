"""The forward kernel of one formula, whose functions and constants (codegen.py) source.py adds to this
module.

A program owns a block of rows. It walks over the keys, keeps a running peak and rescales what it has summed
when the peak rises.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import LOG2E, is_finite, kept
from unsoft.engines.triton.kernel.structures import Rows
from unsoft.engines.triton.kernel.tiles import (
    at_head,
    cleaned,
    load_entries,
    load_rows,
    load_values,
    must_run,
    only,
    positions,
    seen_entries,
    seen_keys,
    store_rows,
)


@triton.jit
def add_keys(
    sums, begin, end, queries, rows, k, v, head, FIXED: tl.constexpr, N: tl.constexpr, CHECK: tl.constexpr
):
    """Keys begin .. end added to the sums: of values [M, BV], the peak so far [M, 1] and the mass [M, 1]. In
    exact kernels also: which rows see NaN or Inf in queries, keys or bias [M, 1], and which outputs see it in
    the values [M, BV]."""
    acc, top, z, bad_rows, bad_sums = sums
    local, extras, limit = tl.arange(0, N), head.extras, head.shape.keys
    keys, n, i, p = local[None, :], rows.n, rows.i, head.parameters
    columns_d, columns_v = tl.arange(0, FIXED.padded)[:, None], tl.arange(0, FIXED.value_padded)[None, :]
    for j0 in tl.range(begin, end, N):
        raw_keys = load_rows(k, j0, keys, limit, columns_d, FIXED.width, FIXED.padded, CHECK)
        key_tile = cleaned(raw_keys, FIXED.exact)
        s = tl.dot(
            cleaned(queries, FIXED.exact), key_tile, input_precision=FIXED.precision, out_dtype=acc.dtype
        )
        s = s * head.scale
        b = 0.0
        if extras.bias.pointer is not None:
            raw_bias = load_entries(extras.bias, rows, j0, keys, head.shape, CHECK)
            b = cleaned(raw_bias, FIXED.exact)
            if not BIAS_IN_FORMULA:
                s += b
        j = positions(extras.key_positions, j0, keys, 0, limit, FIXED.double, CHECK)
        seen = seen_entries(head, rows, j0, keys, FIXED.causal, CHECK)
        m = 0.0
        if HAS_PEAK:
            peaks = only(seen, peak(s, 0.0, n, i, j, b, p), float("-inf"))
            new = tl.maximum(top, tl.max(peaks, 1)[:, None])
            m = tl.where(new == float("-inf"), 0.0, new)
            drop = (top - m) * LOG2E
            acc = acc * tl.exp2(drop)
            if HAS_MASS:
                z = z * tl.exp2(drop * DEGREE)
            top = new
        weight, mass = value(s, m, n, i, j, b, p)
        weight = only(seen, weight, 0.0)
        if HAS_MASS:
            z += tl.sum(only(seen, mass, 0.0), 1)[:, None]
        if extras.seed is not None:
            keep = kept(extras.seed, head.threshold, head.number, rows.start + rows.local, j0 + keys)
            weight = tl.where(keep, weight, 0.0)
        raw_values = load_rows(
            v, j0, local[:, None], limit, columns_v, FIXED.value_width, FIXED.value_padded, CHECK
        )
        values = cleaned(raw_values, FIXED.exact)
        acc = tl.dot(
            weight.to(values.dtype), values, acc, input_precision=FIXED.precision, out_dtype=acc.dtype
        )
        if FIXED.exact:
            bad = any_bad(queries, 1)[:, None] | any_bad(raw_keys, 0)[None, :]
            if extras.bias.pointer is not None:
                bad = bad | (is_finite(raw_bias) == 0)
            bad_rows = tl.maximum(bad_rows, tl.max((seen & bad).to(tl.int32), 1)[:, None])
            bad_values = (is_finite(raw_values) == 0).to(tl.float16)
            bad_sums = tl.dot(seen.to(tl.float16), bad_values, bad_sums)
    return acc, top, z, bad_rows, bad_sums


@triton.jit
def any_bad(tile, AXIS: tl.constexpr):
    return tl.max((is_finite(tile) == 0).to(tl.int32), AXIS) > 0


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    peaks,
    totals,
    grad,
    deltas,
    flag,
    extras,
    numbers,
    shape,
    FIXED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Output, peaks and totals; or, if ``grad`` is given, its product with the output of each row before NaN
    is added to that."""
    if must_run(flag, FIXED.exact):
        REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
        block, number = tl.program_id(0), tl.program_id(1)
        if FIXED.causal:
            block = tl.num_programs(0) - 1 - block  # longest rows first
        batch, h, i0 = number // shape.heads, number % shape.heads, block * M
        head = head_of(extras, numbers, shape, number, FIXED.double)
        local, columns_v = tl.arange(0, M)[:, None], tl.arange(0, FIXED.value_padded)[None, :]
        n = load_values(head.extras.counts, i0, local, shape.queries, 1.0, True)
        i = positions(head.extras.row_positions, i0, local, shape.offset, shape.queries, FIXED.double, True)
        rows = Rows(i0, local, 0.0, n, i, 1.0, 0.0)
        columns_d = tl.arange(0, FIXED.padded)[None, :]
        queries = load_rows(
            at_head(q, batch, h), i0, local, shape.queries, columns_d, FIXED.width, FIXED.padded, True
        )
        sums = (
            tl.zeros((M, FIXED.value_padded), REAL),
            tl.full((M, 1), float("-inf"), REAL),
            tl.zeros((M, 1), REAL),
            tl.zeros((M, 1), tl.int32),
            tl.zeros((M, FIXED.value_padded if FIXED.exact else 1), tl.float32),
        )
        whole, end = seen_keys(i0, shape, FIXED.causal, M, N)
        k, v = at_head(k, batch, h // FIXED.group), at_head(v, batch, h // FIXED.group)
        if FIXED.exact:
            whole = 0
        else:
            sums = add_keys(sums, 0, whole, queries, rows, k, v, head, FIXED, N, False)
        acc, top, z, bad_rows, bad_sums = add_keys(
            sums, whole, end, queries, rows, k, v, head, FIXED, N, True
        )
        m, p = tl.where(top == float("-inf"), 0.0, top), head.parameters
        rescale = tl.zeros((M, 1), REAL) + factor(m, n, i, p)
        if HAS_MASS:
            z += offset_mass(m, n, i, p)
            size = norm(m, n, i, z, p)
            TINY: tl.constexpr = 2.2250738585072014e-308 if FIXED.double else 1.1754943508222875e-38
            gone = tl.abs(size) < TINY
            rescale = tl.where(gone, 0.0, rescale / tl.where(gone, 1.0, size))
        else:
            z += 1.0
        result = acc * (rescale * head.keep_factor)
        at, exists = number.to(tl.int64) * shape.queries + i0 + local, local < shape.queries - i0
        if deltas is None:
            if FIXED.exact:
                result = tl.where((bad_rows > 0) | (bad_sums > 0), float("nan"), result)
            store_rows(at_head(out, batch, h), i0, local, shape.queries, columns_v, result, FIXED.value_width)
            tl.store(peaks + at, m, mask=exists)
            tl.store(totals + at, z, mask=exists)
        else:
            grads = load_rows(
                at_head(grad, batch, h),
                i0,
                local,
                shape.queries,
                columns_v,
                FIXED.value_width,
                FIXED.value_padded,
                True,
            )
            tl.store(deltas + at, tl.sum(grads.to(REAL) * result, 1)[:, None], mask=exists)
