"""What the kernels of one formula share; its functions and constants (codegen.py) are added to this module by
source.py."""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import kept
from unsoft.engines.triton.kernel.structures import Head, Rows
from unsoft.engines.triton.kernel.tiles import (
    at_head,
    cleaned,
    extras_at_head,
    full_precision,
    load_entries,
    load_values,
    only,
    positions,
)


@triton.jit
def head_of(extras, numbers, shape, number, DOUBLE: tl.constexpr):
    """What belongs to one of the B * H heads."""
    batch, h = number // shape.heads, number % shape.heads
    return Head(
        number,
        extras_at_head(extras, batch, h),
        shape,
        parameters(extras.parameters, shape.heads, h),
        full_precision(numbers.scale, numbers.scale_low, DOUBLE),
        full_precision(numbers.keep_factor, numbers.keep_factor_low, DOUBLE),
        numbers.threshold,
    )


@triton.jit
def rows_of(head, gradients, i0, local, DOUBLE: tl.constexpr, CHECK: tl.constexpr):
    """Some rows of a head, for the backward kernels."""
    batch, h, limit = head.number // head.shape.heads, head.number % head.shape.heads, head.shape.queries
    return Rows(
        i0,
        local,
        load_values(at_head(gradients.peaks, batch, h), i0, local, limit, 0.0, CHECK),
        load_values(head.extras.counts, i0, local, limit, 1.0, CHECK),
        positions(head.extras.row_positions, i0, local, head.shape.offset, limit, DOUBLE, CHECK),
        load_values(at_head(gradients.inverses, batch, h), i0, local, limit, 1.0, CHECK),
        load_values(at_head(gradients.totals, batch, h), i0, local, limit, 0.0, CHECK),
    )


@triton.jit
def slopes(s, d_weight, seen, rows, j0, keys, head, FIXED: tl.constexpr, CHECK: tl.constexpr):
    """Of one tile, from its logits before the bias, the gradient of its weights and which entries count:
    logits, j, bias; weights, the gradient of the weights before the norm, of the logits and of the bias."""
    extras, b = head.extras, 0.0
    if extras.bias.pointer is not None:
        b = cleaned(load_entries(extras.bias, rows, j0, keys, head.shape, CHECK), FIXED.exact)
        if not BIAS_IN_FORMULA:
            s += b
    j = positions(extras.key_positions, j0, keys, 0, head.shape.keys, FIXED.double, CHECK)
    weight, by_s, mass_by_s, by_bias, mass_by_bias = slope(s, rows.m, rows.n, rows.i, j, b, head.parameters)
    weight, d_weight = weight * rows.inverse, d_weight * rows.inverse
    if extras.seed is not None:
        keep = kept(extras.seed, head.threshold, head.number, rows.start + rows.local, j0 + keys)
        d_weight = tl.where(keep, d_weight * head.keep_factor, 0.0)
        weight = tl.where(keep, weight * head.keep_factor, 0.0)
    ds = by_s * d_weight
    if HAS_MASS:
        ds += mass_by_s * rows.d_total
    d_bias = ds
    if BIAS_IN_FORMULA:
        d_bias = by_bias * d_weight
        if HAS_MASS:
            d_bias += mass_by_bias * rows.d_total
    return s, j, b, only(seen, weight, 0.0), d_weight, only(seen, ds, 0.0), only(seen, d_bias, 0.0)
