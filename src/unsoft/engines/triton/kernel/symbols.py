"""What belongs to a head, to some rows and to some keys: the symbols of one formula, whose functions and
constants (codegen.py) source.py adds to this module."""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.structures import Head, Keys, Rows
from unsoft.engines.triton.kernel.tiles import (
    cleaned,
    extras_at_head,
    full_precision,
    load_entries,
    load_values,
    places,
    positions,
)


@triton.jit
def head_of(extras, numbers, shape, number, DOUBLE: tl.constexpr):
    """What belongs to one of the B * H heads; if ``number`` is a tensor [M, 1], to one for each row."""
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
def rows_at(head, start, local, FIXED: tl.constexpr, CHECK: tl.constexpr):
    """Some rows of a head, without what only backward kernels need."""
    extras, limit, fields = head.extras, head.shape.queries, (0.0,)
    if extras.query_fields.pointer is not None:
        at, mask = places(extras.query_fields, start, local), local < limit - start
        fields = query_fields(at, extras.query_fields.strides[3], mask, FIXED.exact)
    n = load_values(extras.counts, start, local, limit, 1.0, CHECK)
    i = positions(extras.row_positions, start, local, head.shape.offset, limit, FIXED.double, CHECK)
    return Rows(start, local, n, i, fields, 0.0, 1.0, 0.0)


@triton.jit
def keys_at(head, start, local, FIXED: tl.constexpr, CHECK: tl.constexpr):
    """Some keys, as a head sees them."""
    extras, limit, fields = head.extras, head.shape.keys, (0.0,)
    if extras.key_fields.pointer is not None:
        at, mask = places(extras.key_fields, start, local), local < limit - start
        fields = key_fields(at, extras.key_fields.strides[3], mask, FIXED.exact)
    j = positions(extras.key_positions, start, local, 0, limit, FIXED.double, CHECK)
    return Keys(start, local, j, fields)


@triton.jit
def load_bias(head, rows, keys, CHECK: tl.constexpr):
    """A tile of the additive mask; None if there is none."""
    if head.extras.bias.pointer is None:
        return None
    else:
        return load_entries(head.extras.bias, rows, keys, head.shape, CHECK)


@triton.jit
def biased(s, raw_bias, EXACT: tl.constexpr):
    """The logits with the additive mask on them, unless the formula wants it elsewhere; and that mask."""
    if raw_bias is None:
        return s, 0.0
    else:
        b = cleaned(raw_bias, EXACT)
        if BIAS_IN_FORMULA:
            return s, b
        else:
            return s + b, b
