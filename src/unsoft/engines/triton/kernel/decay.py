"""The gradient of a decay: what a chunk owes to log d, summed over its weights d^(i-j) q_i . k_j, over what
its rows take from the state before it, and over how that becomes the state after it."""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.recurrence import place_in, rows_of
from unsoft.engines.triton.kernel.tiles import at_head, load_values


@triton.jit
def decay_kernel(
    q,
    k,
    v,
    grad,
    slopes,
    log_decay,
    states,
    later,
    out,
    shape,
    FIXED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """``states``: before each chunk; ``later``: gradients of the states after each chunk; ``out``: (B, H,
    chunks)."""
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    chunk, number = tl.program_id(0), tl.program_id(1)
    batch, h = number // shape.heads, number % shape.heads
    q, k = at_head(q, batch, h), at_head(k, batch, h // FIXED.group)
    grad, v = at_head(grad, batch, h), at_head(v, batch, h // FIXED.group)
    log_d, t0, tokens = tl.load(log_decay + h), chunk * M, tl.arange(0, M)
    there = tl.minimum(shape.tokens - t0, M)
    a, b = tokens[:, None], tokens[None, :]
    since, until = (a + 1).to(REAL), tl.maximum(there - 1 - a, 0).to(REAL)
    before, column = place_in(states, number, chunk, FIXED)
    after, after_column = place_in(later, number, chunk, FIXED)
    slope = tl.zeros((M, 1), REAL)
    if slopes.pointer is not None:
        slope += load_values(at_head(slopes, batch, h), t0, a, shape.tokens, 0.0, True)
    weights, d_weights = tl.zeros((M, M), REAL), tl.zeros((M, M), REAL) + slope
    rows, keys = tl.zeros((M, 1), REAL), tl.zeros((M, 1), REAL)
    kept = tl.zeros((1,), REAL)
    for f0 in tl.range(0, FIXED.feature_width, N):
        f = f0 + tl.arange(0, N)
        queries = rows_of(q, t0, a, shape.tokens, f[None, :], FIXED.feature_width, FIXED, N)
        own_keys = rows_of(k, t0, a, shape.tokens, f[None, :], FIXED.feature_width, FIXED, N)
        weights = tl.dot(
            queries, tl.trans(own_keys), weights, input_precision=FIXED.precision, out_dtype=REAL
        )
        sums = tl.load(column + f, mask=f < FIXED.feature_width, other=0.0)[None, :]
        d_sums = tl.load(after_column + f, mask=f < FIXED.feature_width, other=0.0)[None, :]
        rows += tl.sum(queries * sums, 1)[:, None] * slope
        keys += tl.sum(own_keys * d_sums, 1)[:, None]
        kept += tl.sum(sums * d_sums, 1)
        for v0 in tl.range(0, FIXED.value_width, N):
            c = v0 + tl.arange(0, N)
            at = f[:, None] * FIXED.value_width + c[None, :]
            inside = (f < FIXED.feature_width)[:, None] & (c < FIXED.value_width)[None, :]
            state = tl.load(before + at, mask=inside, other=0.0)
            d_state = tl.load(after + at, mask=inside, other=0.0)
            grads = rows_of(grad, t0, a, shape.tokens, c[None, :], FIXED.value_width, FIXED, N)
            values = rows_of(v, t0, a, shape.tokens, c[None, :], FIXED.value_width, FIXED, N)
            read = tl.dot(queries, state, input_precision=FIXED.precision, out_dtype=REAL)
            written = tl.dot(own_keys, d_state, input_precision=FIXED.precision, out_dtype=REAL)
            rows += tl.sum(read * grads, 1)[:, None]
            keys += tl.sum(written * values, 1)[:, None]
            kept += tl.sum(tl.sum(state * d_state, 1)[None, :], 1)
    for v0 in tl.range(0, FIXED.value_width, N):
        c = v0 + tl.arange(0, N)
        grads = rows_of(grad, t0, a, shape.tokens, c[None, :], FIXED.value_width, FIXED, N)
        values = rows_of(v, t0, a, shape.tokens, c[None, :], FIXED.value_width, FIXED, N)
        d_weights = tl.dot(
            grads, tl.trans(values), d_weights, input_precision=FIXED.precision, out_dtype=REAL
        )
    distance = tl.maximum(a - b, 0).to(REAL)
    inside_chunk = distance * tl.exp2(log_d * distance) * weights * d_weights
    by_row = tl.sum(inside_chunk, 1)[:, None]
    by_row += since * tl.exp2(log_d * since) * rows + until * tl.exp2(log_d * until) * keys
    length = there.to(REAL)
    result = tl.sum(by_row, 0) + length * tl.exp2(log_d * length) * kept
    tl.store(out + number * tl.num_programs(0) + chunk + tl.arange(0, 1), result)
