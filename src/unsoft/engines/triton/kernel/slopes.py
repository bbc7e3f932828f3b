"""What the backward kernels of one formula share; its functions and constants (codegen.py) and what
symbols.py defines are added to this module by source.py."""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.structures import Rows
from unsoft.engines.triton.kernel.tiles import at_head, load_values, only, survives


@triton.jit
def rows_of(head, gradients, start, local, FIXED: tl.constexpr, CHECK: tl.constexpr):
    """Some rows of a head, with their peaks and gradients."""
    batch, h, limit = head.number // head.shape.heads, head.number % head.shape.heads, head.shape.queries
    rows = rows_at(head, start, local, FIXED, CHECK)
    return Rows(
        start,
        local,
        rows.n,
        rows.i,
        rows.fields,
        load_values(at_head(gradients.peaks, batch, h), start, local, limit, 0.0, CHECK),
        load_values(at_head(gradients.inverses, batch, h), start, local, limit, 1.0, CHECK),
        load_values(at_head(gradients.totals, batch, h), start, local, limit, 0.0, CHECK),
    )


@triton.jit
def slopes(s, d_weight, seen, rows, keys, head, FIXED: tl.constexpr, CHECK: tl.constexpr):
    """Of one tile, from its logits before the bias, the gradient of its weights and which entries count:
    logits and bias; weights, the gradient of the weights before the norm, of the logits and of the bias."""
    s, b = biased(s, load_bias(head, rows, keys, CHECK), FIXED.exact)
    weight, by_s, mass_by_s, by_bias, mass_by_bias = slope(s, rows.m, rows, keys, b, head.parameters)
    weight, d_weight = weight * rows.inverse, d_weight * rows.inverse
    if head.extras.seed is not None:
        keep = survives(head, rows, keys)
        d_weight = tl.where(keep, d_weight * head.keep_factor, 0.0)
        weight = tl.where(keep, weight * head.keep_factor, 0.0)
    ds = chained(by_s, mass_by_s, d_weight, rows, seen)
    d_bias = ds
    if BIAS_IN_FORMULA:
        d_bias = chained(by_bias, mass_by_bias, d_weight, rows, seen)
    return s, b, only(seen, weight, 0.0), d_weight, ds, d_bias


@triton.jit
def chained(by_weight, by_mass, d_weight, rows, seen):
    """The gradient that a tile gives to what its weights and masses depend on with these slopes."""
    found = by_weight * d_weight
    if HAS_MASS:
        found += by_mass * rows.d_total
    return only(seen, found, 0.0)


@triton.jit
def in_slot(kind, part, SLOTS: tl.constexpr):
    """A number, or one of each row [M, 1], in column ``kind`` of otherwise empty slots."""
    return tl.where(tl.arange(0, SLOTS)[None, :] == kind, part, 0.0)
