"""The backward kernel of one formula that owns blocks of keys: dk, dv and the gradients of fields of keys.

Tiles are computed again from the peaks of the rows. Functions and constants of the formula (codegen.py) and
what slopes.py defines are added to this module by source.py.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import is_finite
from unsoft.engines.triton.kernel.tiles import (
    add_product,
    at_head,
    cleaned,
    full_precision,
    load_rows,
    must_run,
    seen_entries,
    store_rows,
)


@triton.jit
def add_rows(
    sums,
    begin,
    end,
    skip_from,
    skip,
    key_tile,
    value_tile,
    j0,
    q,
    grad,
    gradients,
    dfields,
    head,
    FIXED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Blocks begin .. end of rows added to dk [N, BD], dv [N, BV] and the gradients of fields [N, slots];
    from block ``skip_from`` on, ``skip`` further ones are left out."""
    dk, dv, df = sums
    local, limit = tl.arange(0, M), head.shape.queries
    keys = keys_at(head, j0, tl.arange(0, N)[:, None], FIXED, True)
    columns_d, columns_v = tl.arange(0, FIXED.padded)[None, :], tl.arange(0, FIXED.value_padded)[None, :]
    for block in tl.range(begin, end):
        i0 = block * M
        if CHECK:
            i0 = tl.where(block >= skip_from, block + skip, block) * M
        rows = rows_of(head, gradients, i0, local[None, :], FIXED, CHECK)
        queries = load_rows(q, i0, local[:, None], limit, columns_d, FIXED.width, FIXED.padded, CHECK)
        queries = cleaned(queries, FIXED.exact)
        grads = load_rows(
            grad, i0, local[:, None], limit, columns_v, FIXED.value_width, FIXED.value_padded, CHECK
        )
        s = tl.dot(key_tile, tl.trans(queries), input_precision=FIXED.precision, out_dtype=dk.dtype)
        d_weight = tl.dot(value_tile, tl.trans(grads), input_precision=FIXED.precision, out_dtype=dk.dtype)
        seen = seen_entries(head, rows, keys, FIXED.causal, CHECK)
        s, b, weight, d_weight, ds, d_bias = slopes(
            s * head.scale, d_weight, seen, rows, keys, head, FIXED, CHECK
        )
        if dfields.pointer is not None:
            for kind in tl.static_range(KEY_FIELDS):
                by_weight, by_mass = key_field_slope(kind, s, rows.m, rows, keys, b, head.parameters)
                part = tl.sum(chained(by_weight, by_mass, d_weight, rows, seen), 1)
                df += in_slot(kind, part[:, None], KEY_FIELD_SLOTS)
        dv = add_product(dv, weight, grads, GROWS, FIXED.precision)
        dk = add_product(dk, ds, queries, GROWS, FIXED.precision)
    return dk, dv, df


@triton.jit
def key_kernel(
    q,
    k,
    v,
    grad,
    dk,
    dv,
    dfields,
    gradients,
    flag,
    extras,
    numbers,
    shape,
    FIXED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    if must_run(flag, FIXED.exact):
        REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
        kv_heads = shape.heads // FIXED.group
        j0, batch, hk = tl.program_id(0) * N, tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
        keys, columns_d = tl.arange(0, N)[:, None], tl.arange(0, FIXED.padded)[None, :]
        columns_v = tl.arange(0, FIXED.value_padded)[None, :]
        raw_keys = load_rows(
            at_head(k, batch, hk), j0, keys, shape.keys, columns_d, FIXED.width, FIXED.padded, True
        )
        raw_values = load_rows(
            at_head(v, batch, hk),
            j0,
            keys,
            shape.keys,
            columns_v,
            FIXED.value_width,
            FIXED.value_padded,
            True,
        )
        key_tile, value_tile = cleaned(raw_keys, FIXED.exact), cleaned(raw_values, FIXED.exact)
        d_keys, d_values = tl.zeros((N, FIXED.padded), REAL), tl.zeros((N, FIXED.value_padded), REAL)
        # Blocks of rows: first .. middle cross the diagonal, middle .. last see every key of the tile,
        # last .. stop cross the edge of the matrix.
        first, middle, last, stop = 0, 0, shape.queries // M, tl.cdiv(shape.queries, M)
        if FIXED.causal:
            first = tl.minimum(tl.maximum(j0 - shape.offset, 0) // M, stop)
            middle = tl.cdiv(tl.maximum(j0 + N - 1 - shape.offset, 0), M)
            middle = tl.minimum(tl.maximum(middle, first), stop)
        if FIXED.exact:
            middle = stop
        elif j0 + N > shape.keys:
            middle = stop
        last = tl.maximum(last, middle)
        for member in range(FIXED.group):
            h = hk * FIXED.group + member
            head = head_of(extras, numbers, shape, batch * shape.heads + h, FIXED.double)
            q_h, grad_h = at_head(q, batch, h), at_head(grad, batch, h)
            sums = (d_keys, d_values, tl.zeros((N, KEY_FIELD_SLOTS), REAL))
            if not FIXED.exact:
                sums = add_rows(
                    sums,
                    middle,
                    last,
                    0,
                    0,
                    key_tile,
                    value_tile,
                    j0,
                    q_h,
                    grad_h,
                    gradients,
                    dfields,
                    head,
                    FIXED,
                    M,
                    N,
                    False,
                )
            sums = add_rows(
                sums,
                first,
                middle + stop - last,
                middle,
                last - middle,
                key_tile,
                value_tile,
                j0,
                q_h,
                grad_h,
                gradients,
                dfields,
                head,
                FIXED,
                M,
                N,
                True,
            )
            d_keys, d_values, df = sums
            if dfields.pointer is not None:
                kinds = tl.arange(0, KEY_FIELD_SLOTS)[None, :]
                store_rows(at_head(dfields, batch, h), j0, keys, shape.keys, kinds, df, KEY_FIELDS)
        d_keys = d_keys * full_precision(numbers.scale, numbers.scale_low, FIXED.double)
        if FIXED.exact:
            d_keys = tl.where(is_finite(raw_keys), d_keys, 0.0)
            d_values = tl.where(is_finite(raw_values), d_values, 0.0)
        store_rows(at_head(dk, batch, hk), j0, keys, shape.keys, columns_d, d_keys, FIXED.width)
        store_rows(at_head(dv, batch, hk), j0, keys, shape.keys, columns_v, d_values, FIXED.value_width)
