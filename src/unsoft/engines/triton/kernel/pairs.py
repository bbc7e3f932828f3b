"""Linear attention whose features are logarithms, inside chunks of M tokens: the weights

    W_ij = sum_f exp(q_if + k_jf - top_i)    j <= i

and their gradients, with every term computed on its own. A matrix product would need a common factor per
feature for all keys of the chunk. A row that does not see the largest key could then underflow to 0.
``top_i`` is the largest exponent of a row over all keys it sees, also those before the chunk. N features at a
time.
"""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import LOG2E
from unsoft.engines.triton.kernel.tiles import at_head


@triton.jit
def entries(x, t0, local, columns, limit, WIDTH: tl.constexpr, other):
    """Load rows t0 + local of a matrix, in the orientation of the index tensors; ``other`` outside."""
    at = x.pointer + tl.cast(t0, tl.int64) * x.strides[2] + (local * x.strides[2] + columns * x.strides[3])
    return tl.load(at, mask=(local < limit - t0) & (columns < WIDTH), other=other)


@triton.jit
def terms(q, k, tops, t0, f, tokens, FIXED: tl.constexpr, M: tl.constexpr):
    """Return exp(q_if + k_jf - top_i), [M, M, features]; 0 for keys that a row does not see."""
    i, j = tl.arange(0, M)[:, None, None], tl.arange(0, M)[None, :, None]
    queries = entries(q, t0, i, f, tokens, FIXED.feature_width, 0.0)
    keys = entries(k, t0, j, f, tokens, FIXED.feature_width, float("-inf"))
    top = entries(tops, t0, i, i * 0, tokens, 1, 0.0)
    exponents = (queries - top) * LOG2E + keys * LOG2E
    return tl.exp2(tl.where(j <= i, exponents, float("-inf")))


@triton.jit
def pairs_kernel(q, k, tops, weights, shape, FIXED: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Write the weights (B, H, tokens, M), by row and by index of the key in the chunk."""
    batch, h = tl.program_id(1) // shape.heads, tl.program_id(1) % shape.heads
    t0 = tl.program_id(0) * M
    q, k = at_head(q, batch, h), at_head(k, batch, h // FIXED.group)
    tops = at_head(tops, batch, h)
    sums = tl.zeros((M, M), tl.float64 if FIXED.double else tl.float32)
    for f0 in tl.range(0, FIXED.feature_width, N):
        f = f0 + tl.arange(0, N)[None, None, :]
        sums += tl.sum(terms(q, k, tops, t0, f, shape.tokens, FIXED, M), 2)
    weights = at_head(weights, batch, h)
    i, j = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    at = weights.pointer + (tl.cast(t0, tl.int64) + i) * M + j
    tl.store(at, sums, mask=i < shape.tokens - t0)


@triton.jit
def pair_gradients_kernel(
    q, k, tops, grad, out, shape, FIXED: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Write the gradient of queries, or of keys if ``FIXED.of_keys``, from that of the weights."""
    AXIS: tl.constexpr = 0 if FIXED.of_keys else 1
    members: tl.constexpr = FIXED.group if FIXED.of_keys else 1
    batch, own = tl.program_id(1) // shape.heads, tl.program_id(1) % shape.heads
    t0, local = tl.program_id(0) * M, tl.arange(0, M)
    out = at_head(out, batch, own)
    for f0 in tl.range(0, FIXED.feature_width, N):
        f = f0 + tl.arange(0, N)
        result = tl.zeros((M, N), tl.float64 if FIXED.double else tl.float32)
        for member in range(members):
            h = own * members + member
            grad_h, i, j = at_head(grad, batch, h), local[:, None, None], local[None, :, None]
            slopes = entries(grad_h, t0, i, j, shape.tokens, M, 0.0)
            q_h, k_h, top = at_head(q, batch, h), at_head(k, batch, h // FIXED.group), at_head(tops, batch, h)
            e = terms(q_h, k_h, top, t0, f[None, None, :], shape.tokens, FIXED, M)
            result += tl.sum(slopes * e, AXIS)
        at = out.pointer + (tl.cast(t0, tl.int64) + local[:, None]) * out.strides[2]
        at = at + f[None, :] * out.strides[3]
        inside = (local[:, None] < shape.tokens - t0) & (f[None, :] < FIXED.feature_width)
        tl.store(at, result, mask=inside)
