"""The delta rule, and its engines: a state that is corrected by its error at a key, not only added to.

    S_t = D_t S_(t-1) + b_t k_t (v_t - (D_t S_(t-1))^T k_t)^T          o_t = S_t^T q_t

D_t = exp(g_t), a number or a diagonal, is how much of the state is kept; b_t how much of the error is
corrected.

Chunks (Yang et al. 2024): inside a chunk the corrections u solve a triangular system, so that only one
product of matrices per chunk goes from chunk to chunk. Plain differentiable torch, linear in the length.

Shapes: q, k (B, H, T, D), v (B, H, T, Dv), b (B, H, T), g (B, H, T, 1) or (B, H, T, D) or None,
state (B, H, D, Dv).
"""

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from unsoft.engines.native.availability import library, library_failure
from unsoft.engines.native.binding import address, check_status
from unsoft.engines.native.direct import observed
from unsoft.engines.pointwise import native_unsupported
from unsoft.engines.registry import Engine, Registry, no_reason
from unsoft.engines.threads import thread_count

_CHUNK, _NARROW_CHUNK = 64, 16
"""Tokens per chunk. Where every channel decays by itself, exp(g) of half a chunk must not overflow."""
# 16 tokens of exp(-5) come to exp(-80). Its inverse exp(80) = 5.5e34 is in the range of float32 (3.4e38).
LOWEST = -5.0
"""The least logarithm of a decay that chunks can take where every channel has its own."""
_MIDDLE = 2.0**57
"""About exp(40), half of what a chunk of such decays can come to."""
_STEP = 4
"""Up to this many tokens are taken one by one."""
_COMPILED_CHUNK = 32
"""Tokens per chunk of compiled code, unless every channel has its own decay."""
_CALL = struct.Struct("25q")


def delta_attention(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, g: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, Dv) and the state after the last token.

    >>> q, k, v = (torch.nn.functional.normalize(torch.rand(1, 2, 70, 3), dim=-1) for _ in range(3))
    >>> b, g = torch.rand(1, 2, 70), -torch.rand(1, 2, 70, 1)
    >>> whole, after = delta_attention(q, k, v, b, g, None)
    >>> one_by_one, _ = token_by_token(q, k, v, b, g, None)
    >>> torch.allclose(whole, one_by_one, atol=1e-5)
    True
    """
    length = q.shape[2]
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    if length <= _STEP:
        return token_by_token(q, k, v, b, g, state)
    size = min(_CHUNK if g is None or g.shape[3] == 1 else _NARROW_CHUNK, length)
    chunks = -(-length // size)
    q, k, v, b = (_cut(x, size, chunks) for x in (q, k, v, b[..., None]))
    g = None if g is None else _cut(g, size, chunks).cumsum(3)
    inside, among = _products(q, k, g)
    kept = 1.0 if g is None else g.exp()  # from the beginning of the chunk to each token
    right = torch.cat([b * v, b * kept * k], dim=-1)
    solved = torch.linalg.solve_triangular(b * among, right, upper=False, unitriangular=True)
    new, reading = solved.split([v.shape[4], k.shape[4]], dim=-1)
    if g is not None:
        last = g[..., -1:, :]
        k, fading = k * (last - g).exp(), last.exp().mT
    states, corrections = [], []
    for chunk in range(chunks):
        states.append(state)
        corrections.append(new[:, :, chunk] - reading[:, :, chunk] @ state)
        added = k[:, :, chunk].mT @ corrections[-1]
        state = state + added if g is None else fading[:, :, chunk] * state + added
    out = inside @ torch.stack(corrections, dim=2) + (q * kept) @ torch.stack(states, dim=2)
    return out.flatten(2, 3)[:, :, :length], state


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, g: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the same, computed as it is defined: the specification."""
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[2]):
        if g is not None:
            state = g[:, :, t, :, None].exp() * state
        key = k[:, :, t, :, None]
        error = v[:, :, t, None, :] - key.mT @ state
        state = state + key @ (b[:, :, t, None, None] * error)
        outs.append(q[:, :, t, None, :] @ state)
    return torch.cat(outs, dim=2) if outs else v, state


def _cut(x: Tensor, size: int, chunks: int) -> Tensor:
    """Return (B, H, T, X) as (B, H, chunks, size, X), padded with tokens that change nothing."""
    cut: Tensor = pad(x, (0, 0, 0, chunks * size - x.shape[2])).unflatten(2, (chunks, size))
    return cut


def _products(q: Tensor, k: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q_i . k_j for j <= i and k_i . k_j for j < i in every chunk, times what is kept of j until i."""
    if g is None:
        return (q @ k.mT).tril(), (k @ k.mT).tril(-1)
    if g.shape[4] == 1:
        later = torch.ones(g.shape[3], g.shape[3], dtype=torch.bool, device=g.device).triu(1)
        # g falls, so g_i - g_j <= 0 for j <= i. The other half would be exp of a positive number. It is
        # masked before exp, not after it, or its gradient would be 0 * Inf.
        kept = (g - g.mT).masked_fill(later, -torch.inf).exp()
        return q @ k.mT * kept, (k @ k.mT * kept).tril(-1)
    # exp(g) reaches down to exp(-80) and 1 / exp(g) up to exp(80). A power of two, which is exact, brings
    # both to the middle, so that gradients do not overflow. A factor that depends on the chunk would let
    # later tokens change earlier rows, by a rounding.
    shrunk, grown = g.exp() * _MIDDLE, k * ((-g).exp() / _MIDDLE)
    return ((q * shrunk) @ grown.mT).tril(), ((k * shrunk) @ grown.mT).tril(-1)


def compiled_delta(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, g: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what :func:`delta_attention` does, for float32 or float64 on the
    CPU.

    >>> q, k, v = (torch.nn.functional.normalize(torch.rand(1, 2, 70, 8), dim=-1) for _ in range(3))
    >>> b, g = torch.rand(1, 2, 70), -torch.rand(1, 2, 70, 1)
    >>> out, after = compiled_delta(q, k, v, b, g, None)
    >>> torch.allclose(out, token_by_token(q, k, v, b, g, None)[0], atol=1e-5)
    True
    """
    result: tuple[Tensor, Tensor] = _Delta.apply(q, k, v, b, g, state)  # type: ignore[no-untyped-call]
    return result


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, b, g, state = inputs = [None if x is None else x.contiguous() for x in tensors]
        assert q is not None and k is not None and v is not None
        (batch, heads, tokens, width), values = q.shape, v.shape[3]
        gates = 0 if g is None else g.shape[3]
        chunk = min(_NARROW_CHUNK if gates > 1 else _COMPILED_CHUNK, tokens)
        out, after = torch.empty_like(v), q.new_empty(batch, heads, width, values)
        states = None
        if any(ctx.needs_input_grad):
            states = q.new_empty(batch, heads, -(-tokens // chunk), width, values)
        ctx.sizes = (batch, heads, tokens, width, values, gates, chunk)
        ctx.save_for_backward(*inputs, states)
        _run("unsoft_delta_forward", q.dtype, ctx.sizes, [*inputs, out, after, states])
        return out, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_after: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, states = ctx.saved_tensors
        gradients = [None if x is None else torch.empty_like(x) for x in inputs]
        upstream = [grad_out.contiguous(), grad_after.contiguous()]
        everything = [*inputs, None, None, states, *upstream, *gradients]
        _run("unsoft_delta_backward", inputs[0].dtype, ctx.sizes, everything)
        return tuple(gradients)


def _run(name: str, dtype: torch.dtype, sizes: tuple[int, ...], tensors: list[Tensor | None]) -> None:
    """Call a function with the fields of struct Delta of kernel/delta.cpp."""
    fields = [thread_count(), *sizes, *map(address, tensors)]
    call = _CALL.pack(*fields, *(0,) * (25 - len(fields)))
    check_status(getattr(library("delta", dtype == torch.float64), name)(call))


class DeltaCall(NamedTuple):
    """The arguments of :func:`delta_attention`, in the dtype of the arithmetic."""

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    g: Tensor | None
    state: Tensor | None


def _native_unsupported(call: DeltaCall) -> str | None:
    if torch.compiler.is_compiling() or observed():
        return "compiled code goes past torch.compile, torch's modes and transforms; use 'tiled'"
    return native_unsupported(call.q)


DELTA: Registry[DeltaCall, tuple[Tensor, Tensor]] = Registry(
    [
        Engine(
            "native",
            _native_unsupported,
            lambda call: compiled_delta(*call),
            unavailable_reason=lambda call: library_failure("delta", call.q.dtype == torch.float64),
        ),
        Engine("tiled", no_reason, lambda call: delta_attention(*call)),
        Engine("dense", no_reason, lambda call: token_by_token(*call)),
    ],
    missing={
        "triton": "it runs formulas only, and this is the delta rule; use 'tiled'",
        "sdpa": "it computes softmax, and this is the delta rule; use 'tiled'",
    },
)
"""All engines for the delta rule, the preferred ones first."""
