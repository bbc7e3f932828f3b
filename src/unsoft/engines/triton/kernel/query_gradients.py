"""The backward kernel of one formula that owns blocks of rows: dq, and the gradients of parameters, fields of
queries and bias.

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
    inside,
    load_rows,
    must_run,
    seen_entries,
    seen_keys,
    store_rows,
)


@triton.jit
def add_keys(
    sums,
    begin,
    end,
    queries,
    grads,
    rows,
    k,
    v,
    dbias,
    dfields,
    head,
    FIXED: tl.constexpr,
    PARAMETERS_TOO: tl.constexpr,
    N: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Keys begin .. end added to the gradients of the queries [M, BD], the parameters [1, slots] and the
    fields [M, slots]."""
    dq, dp, df = sums
    local, limit, p = tl.arange(0, N), head.shape.keys, head.parameters
    down = local[:, None]
    columns_d, columns_v = tl.arange(0, FIXED.padded)[None, :], tl.arange(0, FIXED.value_padded)[None, :]
    for j0 in tl.range(begin, end, N):
        key_tile = load_rows(k, j0, down, limit, columns_d, FIXED.width, FIXED.padded, CHECK)
        key_tile = cleaned(key_tile, FIXED.exact)
        values = load_rows(v, j0, down, limit, columns_v, FIXED.value_width, FIXED.value_padded, CHECK)
        values = cleaned(values, FIXED.exact)
        s = tl.dot(queries, tl.trans(key_tile), input_precision=FIXED.precision, out_dtype=dq.dtype)
        d_weight = tl.dot(grads, tl.trans(values), input_precision=FIXED.precision, out_dtype=dq.dtype)
        keys = keys_at(head, j0, local[None, :], FIXED, CHECK)
        seen = seen_entries(head, rows, keys, FIXED.causal, CHECK)
        s, b, weight, d_weight, ds, d_bias = slopes(
            s * head.scale, d_weight, seen, rows, keys, head, FIXED, CHECK
        )
        if PARAMETERS_TOO:
            for kind in tl.static_range(PARAMETERS):
                by_weight, by_mass = parameter_slope(kind, s, rows.m, rows, keys, b, p)
                part = tl.sum(chained(by_weight, by_mass, d_weight, rows, seen))
                dp += in_slot(kind, part, PARAMETER_SLOTS)
        if dfields.pointer is not None:
            for kind in tl.static_range(QUERY_FIELDS):
                by_weight, by_mass = query_field_slope(kind, s, rows.m, rows, keys, b, p)
                part = tl.sum(chained(by_weight, by_mass, d_weight, rows, seen), 1)
                df += in_slot(kind, part[:, None], QUERY_FIELD_SLOTS)
        if dbias.pointer is not None:
            if FIXED.exact:
                d_bias = tl.where(is_finite(load_bias(head, rows, keys, CHECK)), d_bias, 0.0)
            at = (rows.start + rows.local).to(tl.int64) * dbias.strides[2] + (j0 + keys.local)
            tl.store(dbias.pointer + at, d_bias, mask=inside(rows, keys, head.shape))
        dq = add_product(dq, ds, key_tile, GROWS, FIXED.precision)
    return dq, dp, df


@triton.jit
def query_kernel(
    q,
    k,
    v,
    grad,
    dq,
    dparams,
    dbias,
    dfields,
    gradients,
    flag,
    extras,
    numbers,
    shape,
    FIXED: tl.constexpr,
    PARAMETERS_TOO: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    if must_run(flag, FIXED.exact):
        REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
        block, number = tl.program_id(0), tl.program_id(1)
        if FIXED.causal:
            block = tl.num_programs(0) - 1 - block  # longest rows first
        batch, h, i0 = number // shape.heads, number % shape.heads, block * M
        head = head_of(extras, numbers, shape, number, FIXED.double)
        local, columns_d = tl.arange(0, M)[:, None], tl.arange(0, FIXED.padded)[None, :]
        columns_v = tl.arange(0, FIXED.value_padded)[None, :]
        rows = rows_of(head, gradients, i0, local, FIXED, True)
        raw = load_rows(
            at_head(q, batch, h), i0, local, shape.queries, columns_d, FIXED.width, FIXED.padded, True
        )
        g, queries = at_head(grad, batch, h), cleaned(raw, FIXED.exact)
        grads = load_rows(g, i0, local, shape.queries, columns_v, FIXED.value_width, FIXED.value_padded, True)
        # New names: a branch that is decided when the kernel runs may not give arguments another type.
        k_h, v_h = at_head(k, batch, h // FIXED.group), at_head(v, batch, h // FIXED.group)
        dbias_h = at_head(dbias, batch, h)
        sums = (
            tl.zeros((M, FIXED.padded), REAL),
            tl.zeros((1, PARAMETER_SLOTS), REAL),
            tl.zeros((M, QUERY_FIELD_SLOTS), REAL),
        )
        whole, end = seen_keys(i0, shape, FIXED.causal, M, N)
        if FIXED.exact:
            whole = 0
        else:
            sums = add_keys(
                sums,
                0,
                whole,
                queries,
                grads,
                rows,
                k_h,
                v_h,
                dbias_h,
                dfields,
                head,
                FIXED,
                PARAMETERS_TOO,
                N,
                False,
            )
        result, dp, df = add_keys(
            sums,
            whole,
            end,
            queries,
            grads,
            rows,
            k_h,
            v_h,
            dbias_h,
            dfields,
            head,
            FIXED,
            PARAMETERS_TOO,
            N,
            True,
        )
        result = result * head.scale
        if FIXED.exact:
            result = tl.where(is_finite(raw), result, 0.0)
        store_rows(at_head(dq, batch, h), i0, local, shape.queries, columns_d, result, FIXED.width)
        if PARAMETERS_TOO:
            at = number.to(tl.int64) * dparams.strides[0] + block * PARAMETER_SLOTS
            tl.store(dparams.pointer + at + tl.arange(0, PARAMETER_SLOTS)[None, :], dp)
        if dfields.pointer is not None:
            kinds = tl.arange(0, QUERY_FIELD_SLOTS)[None, :]
            store_rows(at_head(dfields, batch, h), i0, local, shape.queries, kinds, df, QUERY_FIELDS)
