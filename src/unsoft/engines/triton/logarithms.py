"""Linear attention whose features are logarithms, on a GPU: the arithmetic of
:mod:`unsoft.engines.linear.logarithms`, by the kernels of linear attention.

Keys are scaled below 1 by the largest value of every feature up to the end of their chunk, rows by the
largest exponent that they see. The state before a chunk is relative to the largest values so far, so it
shrinks by ``kept`` when a larger one comes. Inside a chunk, where rows see some keys and not others, weights
are computed pair by pair (kernel/recurrence.py); these are an operator with its own gradient.
"""

from typing import Any

import torch
from torch import Tensor

from unsoft.engines.linear.logarithms import largest_zero, or_zero
from unsoft.engines.operator import define, save_inputs
from unsoft.engines.triton.launch import TileSizes, start_on, usual_or_small, views
from unsoft.engines.triton.structures import ChunkShape, PairFixed

SIZES = TileSizes(32, 4, 4, 1)
"""Tokens of a chunk, features at a time, warps and stages. Every term inside a chunk costs an exponential,
every chunk a state in memory: with 32 tokens both take about the same time."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, state: Tensor | None, rough: bool
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, L, Dv) and the state (B, Hk, F, Dv + 2) after the last key."""
    q, length = largest_zero(q), q.shape[2]
    earlier = torch.full_like(k[:, :, 0].detach(), -torch.inf) if state is None else state[..., -1].detach()
    start, weights, kept = None if state is None else state[..., :-1], None, None
    causal = causal and length > 1
    if causal:
        size = chunk_tokens()
        so_far = torch.maximum(k.detach().cummax(2).values, earlier[:, :, None])
        tops = or_zero((_by_key_head(q.detach(), k) + so_far[:, :, None]).amax(-1, keepdim=True))
        ends = (torch.arange(size, length + size, size, device=q.device)).clamp(max=length) - 1
        ends_of_chunks = so_far[:, :, ends]
        before = torch.cat([earlier[:, :, None], ends_of_chunks[:, :, :-1]], dim=2)
        kept = (before - or_zero(ends_of_chunks)).exp()
        keys = (k - or_zero(ends_of_chunks).repeat_interleave(size, dim=2)[:, :, :length]).exp()
        before = before.repeat_interleave(size, dim=2)[:, :, None, :length]
        rows = (_by_key_head(q, k) + before - tops).exp().flatten(1, 2)
        weights, largest = pair_weights(q, k, tops.flatten(1, 2)), ends_of_chunks[:, :, -1]
    else:
        largest = torch.maximum(k.detach().amax(2), earlier)
        rows = _by_key_head(q, k) + largest[:, :, None, None]
        rows = (rows - or_zero(rows.detach().amax(-1, keepdim=True))).exp().flatten(1, 2)
        keys = (k - or_zero(largest)[:, :, None]).exp()
        start = None if start is None else start * (earlier - or_zero(largest)).exp()[..., None]
    run = torch.ops.unsoft.triton_recurrence.default
    options = {"causal": causal, "normalise": True, "rough": rough}
    out, after, _ = run(rows, keys, v, None, start, weights, kept, **options)
    return out, torch.cat([after, largest[..., None]], dim=-1)


def _by_key_head(q: Tensor, k: Tensor) -> Tensor:
    """Return (B, H, L, F) as (B, Hk, group, L, F)."""
    grouped: Tensor = q.unflatten(1, (k.shape[1], -1))
    return grouped


def chunk_tokens() -> int:
    """Return the number of tokens of a chunk if features are logarithms."""
    return usual_or_small(SIZES).rows


def pair_weights(q: Tensor, k: Tensor, tops: Tensor) -> Tensor:
    """Return sum_f exp(q_if + k_jf - top_i) for keys j <= i of the chunk of row i: (B, H, tokens, chunk).

    ``tops``: (B, H, tokens, 1), at least as large as all exponents of the row; not differentiated.
    """
    weights: Tensor = torch.ops.unsoft.triton_pairs.default(q, k, tops, size=chunk_tokens())
    return weights


def _forward(q: Tensor, k: Tensor, tops: Tensor, *, size: int) -> Tensor:
    weights = _forward_shapes(q, k, tops, size=size)
    _run("pairs", weights, q, k, tops, size=size, of_keys=False, weights=weights)
    return weights


def _backward(grad: Tensor, q: Tensor, k: Tensor, tops: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and k."""
    dq, dk = _backward_shapes(grad, q, k, tops, size=size)
    for of_keys, out in ((False, dq), (True, dk)):
        of_weights = {"grad": grad.resolve_neg(), "out": out}
        _run("pair_gradients", out, q, k, tops, size=size, of_keys=of_keys, **of_weights)
    return dq, dk


def _run(
    name: str, result: Tensor, q: Tensor, k: Tensor, tops: Tensor, *, size: int, of_keys: bool, **more: Tensor
) -> None:
    """Start a kernel with one program for each chunk and each head of ``result``."""
    from unsoft.engines.triton.kernel import recurrence

    batch, heads, tokens, _ = result.shape
    start_on(
        q,
        getattr(recurrence, f"{name}_kernel"),
        (-(-tokens // size), batch * heads),
        SIZES._replace(rows=size),
        **views(q=q.resolve_neg(), k=k.resolve_neg(), tops=tops, **more),
        shape=ChunkShape(heads, k.shape[1], tokens),
        FIXED=PairFixed(q.shape[3], q.shape[1] // k.shape[1], of_keys, q.dtype == torch.float64),
    )


def _backward_shapes(grad: Tensor, q: Tensor, k: Tensor, tops: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _forward_shapes(q: Tensor, k: Tensor, tops: Tensor, *, size: int) -> Tensor:
    return q.new_empty(*q.shape[:3], size)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    run = torch.ops.unsoft.triton_pairs_backward.default
    return (*run(grad, *ctx.saved_tensors, **ctx.options), None)


_INPUTS = "Tensor q, Tensor k, Tensor tops, *, int size"
define("triton_pairs", f"({_INPUTS}) -> Tensor", _forward, _forward_shapes, _differentiate, save_inputs)
define("triton_pairs_backward", f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor)", _backward, _backward_shapes)
