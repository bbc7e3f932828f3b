"""Values times the gate of their key, and the gradients of both in one pass over the values."""

import triton
import triton.language as tl

from unsoft.engines.triton.kernel.functions import is_finite
from unsoft.engines.triton.kernel.tiles import at_head, load_rows, load_values, store_rows


@triton.jit
def gating_kernel(
    values,
    gates,
    grad,
    out,
    d_gates,
    shape,
    FIXED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """M keys of a head. With ``grad`` the gradients: of the values to ``out``, of the gates to ``d_gates``,
    to which a value that is not finite adds nothing."""
    REAL: tl.constexpr = tl.float64 if FIXED.double else tl.float32
    PADDED: tl.constexpr = -(-FIXED.width // N) * N
    batch, h = tl.program_id(1) // shape.heads, tl.program_id(1) % shape.heads
    t0, a = tl.program_id(0) * M, tl.arange(0, M)[:, None]
    gate = load_values(at_head(gates, batch, h), t0, a, shape.tokens, 0.0, True).to(REAL)
    values, out = at_head(values, batch, h), at_head(out, batch, h)
    slope = tl.zeros((M, 1), REAL)
    for start in tl.range(0, FIXED.width, N):
        c = start + tl.arange(0, N)[None, :]
        tile = load_rows(values, t0, a, shape.tokens, c, FIXED.width, PADDED, True).to(REAL)
        if grad.pointer is not None:
            above = load_rows(at_head(grad, batch, h), t0, a, shape.tokens, c, FIXED.width, PADDED, True).to(
                REAL
            )
            slope += tl.sum(tl.where(is_finite(tile), tile, 0.0) * above, 1)[:, None]
            tile = above
        store_rows(out, t0, a, shape.tokens, c, tile * gate, FIXED.width)
    if d_gates is not None:
        place = d_gates + tl.program_id(1).to(tl.int64) * shape.tokens + t0 + a
        tl.store(place, slope, mask=a < shape.tokens - t0)
