"""Sums over keys with a running peak, which the forward kernels of one formula share; its functions and
constants (codegen.py) and what symbols.py defines are added to this module by source.py."""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import LOG2E, is_finite
from unsoft.engines.triton.kernel.tiles import (
    add_product,
    any_bad,
    cleaned,
    load_rows,
    only,
    seen_entries,
    survives,
)


@triton.jit
def no_sums(M: tl.constexpr, FIXED: tl.constexpr):
    """Of values [M, BV], the peak so far [M, 1] (or 0 for it, if only -inf, "nothing seen", matters) and the
    mass [M, 1]. In exact kernels also: which rows see
    NaN or Inf in queries, keys, fields or bias [M, 1], and which outputs see it in the values [M, BV]."""
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    return (
        tl.zeros((M, FIXED.value_padded), REAL),
        tl.full((M, 1), float("-inf"), REAL),
        tl.zeros((M, 1), REAL),
        tl.zeros((M, 1), tl.int32),
        tl.zeros((M, FIXED.value_padded if FIXED.exact else 1), tl.float32),
    )


@triton.jit
def add_keys(
    sums, begin, end, queries, rows, k, v, head, FIXED: tl.constexpr, N: tl.constexpr, CHECK: tl.constexpr
):
    """Keys begin .. end added to the sums; they are rescaled when the peak rises."""
    acc, top, z, bad_rows, bad_sums = sums
    local, limit, p = tl.arange(0, N), head.shape.keys, head.parameters
    columns_d, columns_v = tl.arange(0, FIXED.padded)[:, None], tl.arange(0, FIXED.value_padded)[None, :]
    for j0 in tl.range(begin, end, N):
        keys = keys_at(head, j0, local[None, :], FIXED, CHECK)
        raw_keys = load_rows(k, j0, keys.local, limit, columns_d, FIXED.width, FIXED.padded, CHECK)
        key_tile = cleaned(raw_keys, FIXED.exact)
        s = tl.dot(
            cleaned(queries, FIXED.exact), key_tile, input_precision=FIXED.precision, out_dtype=acc.dtype
        )
        raw_bias = load_bias(head, rows, keys, CHECK)
        s, b = biased(s * head.scale, raw_bias, FIXED.exact)
        seen = seen_entries(head, rows, keys, FIXED.causal, CHECK)
        m = 0.0
        if HAS_PEAK:
            peaks = only(seen, peak(s, 0.0, rows, keys, b, p), float("-inf"))
            new = tl.maximum(top, tl.max(peaks, 1)[:, None])
            m = peak_or_zero(new)
            acc, z = lowered(acc, z, top, m)
            top = new
        elif UNDEFINED_ALONE:
            top = tl.maximum(top, tl.max(only(seen, tl.zeros_like(s), float("-inf")), 1)[:, None])
        weight, mass = value(s, m, rows, keys, b, p)
        weight = only(seen, weight, 0.0)
        if HAS_MASS:
            z += tl.sum(only(seen, mass, 0.0), 1)[:, None]
        if head.extras.seed is not None:
            weight = tl.where(survives(head, rows, keys), weight, 0.0)
        raw_values = load_rows(
            v, j0, local[:, None], limit, columns_v, FIXED.value_width, FIXED.value_padded, CHECK
        )
        values = cleaned(raw_values, FIXED.exact)
        acc = add_product(acc, weight, values, GROWS, FIXED.precision)
        if FIXED.exact:
            bad = any_bad(queries, 1)[:, None] | any_bad(raw_keys, 0)[None, :]
            if head.extras.query_fields.pointer is not None:
                bad = bad | (is_finite(rows.fields[QUERY_FIELDS]) == 0)
            if head.extras.key_fields.pointer is not None:
                bad = bad | (is_finite(keys.fields[KEY_FIELDS]) == 0)
            if raw_bias is not None:
                bad = bad | (is_finite(raw_bias) == 0)
            bad_rows = tl.maximum(bad_rows, tl.max((seen & bad).to(tl.int32), 1)[:, None])
            bad_values = (is_finite(raw_values) == 0).to(tl.float16)
            bad_sums = tl.dot(seen.to(tl.float16), bad_values, bad_sums)
    return acc, top, z, bad_rows, bad_sums


@triton.jit
def peak_or_zero(top):
    """The peak of rows; 0 for those that have seen nothing."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def lowered(acc, z, top, m):
    """Sums that belong to the peak ``top`` as sums that belong to the higher peak ``m``."""
    drop = (top - m) * LOG2E
    acc = acc * tl.exp2(drop)
    if HAS_MASS:
        z = z * tl.exp2(drop * DEGREE)
    return acc, z


@triton.jit
def finished(acc, top, z, rows, head, FIXED: tl.constexpr):
    """The output of rows, their peak and their total mass, from the sums over all keys."""
    p, m = head.parameters, peak_or_zero(top)
    rescale = tl.zeros_like(z) + factor(m, rows, p)
    if HAS_MASS:
        z += offset_mass(m, rows, p)
        size = norm(m, rows, z, p)
        TINY: tl.constexpr = 2.2250738585072014e-308 if FIXED.double else 1.1754943508222875e-38
        gone = tl.abs(size) < TINY
        rescale = tl.where(gone, 0.0, rescale / tl.where(gone, 1.0, size))
    else:
        z = tl.zeros_like(z) + 1.0
    if UNDEFINED_ALONE:
        rescale = tl.where(top == float("-inf"), 0.0, rescale)
        m = top
    return acc * (rescale * head.keep_factor), m, z
