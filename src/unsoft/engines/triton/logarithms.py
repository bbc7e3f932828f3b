"""Linear attention whose features come as logarithms, on a GPU: the arithmetic of
:mod:`unsoft.engines.linear.logarithms`, by the kernels of linear attention.

Keys are brought below 1 by the largest of every feature up to the end of their chunk, rows by the largest
exponent that they see. The state before a chunk carries the largest up to there, so it shrinks by ``kept``
when a larger one comes. Inside a chunk, where rows see some keys and not others, weights are made pair by
pair (pairs.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.linear.logarithms import largest_zero, or_zero
from unsoft.engines.triton.pairs import chunk_tokens, pair_weights


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, state: Tensor | None, rough: bool
) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, Dv) and the state (B, Hk, F, Dv + 2) after the last key."""
    q, length = largest_zero(q), q.shape[2]
    earlier = torch.full_like(k[:, :, 0].detach(), -torch.inf) if state is None else state[..., -1].detach()
    if causal and length > 1:
        return _chunked(q, k, v, earlier, state, rough=rough)
    largest = torch.maximum(k.detach().amax(2), earlier)
    rows = _by_key_head(q, k) + largest[:, :, None, None]
    rows = (rows - or_zero(rows.detach().amax(-1, keepdim=True))).exp().flatten(1, 2)
    keys = (k - or_zero(largest)[:, :, None]).exp()
    start = None if state is None else state[..., :-1] * (earlier - or_zero(largest)).exp()[..., None]
    options = {"causal": False, "normalise": True, "rough": rough}
    run = torch.ops.unsoft.triton_recurrence.default
    out, after, _ = run(rows, keys, v, None, start, None, None, **options)
    return out, torch.cat([after, largest[..., None]], dim=-1)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, earlier: Tensor, state: Tensor | None, *, rough: bool
) -> tuple[Tensor, Tensor]:
    """``earlier``: the largest of every feature before the first key."""
    length, size = q.shape[2], chunk_tokens()
    so_far = torch.maximum(k.detach().cummax(2).values, earlier[:, :, None])
    tops = or_zero((_by_key_head(q.detach(), k) + so_far[:, :, None]).amax(-1, keepdim=True))
    ends = (torch.arange(size, length + size, size, device=q.device)).clamp(max=length) - 1
    largest = so_far[:, :, ends]
    before = torch.cat([earlier[:, :, None], largest[:, :, :-1]], dim=2)
    kept = (before - or_zero(largest)).exp()
    keys = (k - or_zero(largest).repeat_interleave(size, dim=2)[:, :, :length]).exp()
    before = before.repeat_interleave(size, dim=2)[:, :, None, :length]
    rows = (_by_key_head(q, k) + before - tops).exp().flatten(1, 2)
    weights = pair_weights(q, k, tops.flatten(1, 2))
    start = None if state is None else state[..., :-1]
    options = {"causal": True, "normalise": True, "rough": rough}
    run = torch.ops.unsoft.triton_recurrence.default
    out, after, _ = run(rows, keys, v, None, start, weights, kept, **options)
    return out, torch.cat([after, largest[:, :, -1, :, None]], dim=-1)


def _by_key_head(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, L, F) as (B, Hk, group, L, F)."""
    found: Tensor = q.unflatten(1, (k.shape[1], -1))
    return found
