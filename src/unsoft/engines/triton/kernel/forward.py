"""The forward kernel of one formula, whose functions and constants (codegen.py) and what sums.py defines
source.py adds to this module.

A program owns a block of rows and walks over the keys.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.tiles import at_head, load_rows, must_run, seen_keys, store_rows


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
        block, number = tl.program_id(0), tl.program_id(1)
        if FIXED.causal:
            block = tl.num_programs(0) - 1 - block  # longest rows first
        batch, h, i0 = number // shape.heads, number % shape.heads, block * M
        head = head_of(extras, numbers, shape, number, FIXED.double)
        local, columns_d = tl.arange(0, M)[:, None], tl.arange(0, FIXED.padded)[None, :]
        columns_v = tl.arange(0, FIXED.value_padded)[None, :]
        rows = rows_at(head, i0, local, FIXED, True)
        queries = load_rows(
            at_head(q, batch, h), i0, local, shape.queries, columns_d, FIXED.width, FIXED.padded, True
        )
        sums, (whole, end) = no_sums(M, FIXED), seen_keys(i0, shape, FIXED.causal, M, N)
        # New names: a branch that is decided when the kernel runs may not give arguments another type.
        k_h, v_h = at_head(k, batch, h // FIXED.group), at_head(v, batch, h // FIXED.group)
        if FIXED.exact:
            whole = 0
        else:
            sums = add_keys(sums, 0, whole, queries, rows, k_h, v_h, head, FIXED, N, False)
        acc, top, z, bad_rows, bad_sums = add_keys(
            sums, whole, end, queries, rows, k_h, v_h, head, FIXED, N, True
        )
        result, m, z = finished(acc, top, z, rows, head, FIXED)
        at, exists = number.to(tl.int64) * shape.queries + i0 + local, local < shape.queries - i0
        if deltas is None:
            if FIXED.exact:
                result = tl.where((bad_rows > 0) | (bad_sums > 0), float("nan"), result)
            store_rows(at_head(out, batch, h), i0, local, shape.queries, columns_v, result, FIXED.value_width)
            tl.store(peaks + at, m, mask=exists)
            tl.store(totals + at, z, mask=exists)
        else:
            g = at_head(grad, batch, h)
            grads = load_rows(
                g, i0, local, shape.queries, columns_v, FIXED.value_width, FIXED.value_padded, True
            )
            tl.store(deltas + at, tl.sum(grads.to(result.dtype) * result, 1)[:, None], mask=exists)
