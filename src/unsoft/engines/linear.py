"""Linear attention: weights that are products of features, computed in time and memory linear in the length.

    a_ij = d^(i-j) f(q_i) . h(k_j) / normaliser_i        j <= i if causal        d: decay of the head, 1 if there is none

The engine gets the features f(q), h(k) and never forms the (L, S) matrix: the causal sum over j is cut into chunks; inside a
chunk the weights are formed, everything before it is one matrix sum_j d^(..) h(k_j) v_j^T per head, the state. The state is
also all that decoding needs, whatever the position. Plain differentiable torch; what autograd keeps grows linearly.

Shapes: q (B, H, L, F), k (B, Hk, S, F), v (B, Hk, S, Dv); H is a multiple of Hk. The normaliser is carried along as one
more column of the values, which is 1 everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.dense import finite_part


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, normalise: bool, decay: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, L, Dv) and the state (B, heads, F, Dv + 1) after the last key.

    ``state`` continues from earlier keys. With it, or with a decay, queries and keys are the same tokens (L = S); a causal
    call without either aligns row i with key i.

    >>> q, k, v = (torch.rand(1, 2, 6, 3, dtype=torch.float64) for _ in range(3))
    >>> whole, _ = linear_attention(q, k, v, causal=True, normalise=True)
    >>> first, state = linear_attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], causal=True, normalise=True)
    >>> rest, _ = linear_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], causal=True, normalise=True, state=state)
    >>> torch.allclose(torch.cat([first, rest], dim=2), whole)
    True
    """
    poison = _poison(q, k, v, causal)
    q, k, v = finite_part(q), finite_part(k), finite_part(v)
    heads, shared = q.shape[1], k.shape[1]
    if decay is not None and heads != shared:  # a state that decays belongs to a query head
        k, v = (x.repeat_interleave(heads // shared, dim=1) for x in (k, v))
        shared = heads
    values = torch.cat([v, v.new_ones(*v.shape[:3], 1)], dim=3)
    if not causal:
        after = k.mT @ values
        summed = _by_group(q, shared) @ after
    elif q.shape[2] == 1:
        after = _step(k, values, decay, state)
        summed = _by_group(q, shared) @ after
    else:
        summed, after = _chunked(q, k, values, decay, state)
    summed = summed.reshape(*q.shape[:3], values.shape[3])
    out = _divided(summed[..., :-1], summed[..., -1:]) if normalise else summed[..., :-1]
    return out if poison is None else out + poison, after


def linear_weights(
    q: Tensor, k: Tensor, *, offset: int | None, normalise: bool, decay: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """The weights (B, H, L, S) written out: the specification of :func:`linear_attention`, for looking at and for masks.

    Key j is visible to row i if ``offset`` is None or j <= i + offset; ``factor`` multiplies the weights before they are
    normalised (0 = masked).
    """
    batch, heads, length, _ = q.shape
    keys = k.shape[2]
    weights = (_by_group(q, k.shape[1]) @ k.mT).reshape(batch, heads, length, keys)
    if offset is not None:
        distance = torch.arange(length, device=q.device)[:, None] + offset - torch.arange(keys, device=q.device)
        if decay is not None:
            weights = weights * _powers(decay, distance.clamp(min=0))
        weights = torch.where(distance >= 0, weights, 0.0)
    if factor is not None:
        weights = torch.where(factor == 0, 0.0, weights * factor)
    return _divided(weights, weights.sum(-1, keepdim=True)) if normalise else weights


def _divided(x: Tensor, by: Tensor) -> Tensor:
    """x / by, and 0 where ``by`` is 0, with gradient 0 there."""
    zero = by == 0
    return torch.where(zero, 0.0, x / torch.where(zero, 1.0, by))


def _by_group(q: Tensor, shared: int) -> Tensor:
    """(B, H, L, F) as (B, Hk, G L, F): query heads that share a key head are stacked as rows."""
    batch, heads, length, width = q.shape
    return q if heads == shared else q.reshape(batch, shared, heads // shared * length, width)


def _powers(decay: Tensor, exponents: Tensor) -> Tensor:
    """decay ** exponents, (H, *exponents.shape); the exponents are non-negative integers."""
    return decay.view(-1, *(1,) * exponents.dim()) ** exponents


def _step(k: Tensor, values: Tensor, decay: Tensor | None, state: Tensor | None) -> Tensor:
    """The state after one more token."""
    added = k.mT @ values
    if state is None:
        return added
    return added + (state if decay is None else state * decay.view(-1, 1, 1))


def _chunked(
    q: Tensor, k: Tensor, values: Tensor, decay: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q.shape
    shared, group = k.shape[1], heads // k.shape[1]
    size = min(chunk_size(width), length)
    chunks = -(-length // size)
    q = _padded(q, chunks * size).view(batch, shared, group, chunks, size, width)
    q = q.transpose(2, 3).reshape(batch, shared, chunks, group * size, width)
    k = _padded(k, chunks * size).view(batch, shared, chunks, size, width)
    values = _padded(values, chunks * size).view(batch, shared, chunks, size, values.shape[3])

    place = torch.arange(size, device=q.device)
    within = place[:, None] - place
    keep = (within >= 0).to(q.dtype) if decay is None else _powers(decay, within.clamp(min=0)) * (within >= 0)
    keep = keep if decay is None else keep[:, None]
    inside = ((q @ k.mT) * keep.repeat(*(1,) * (keep.dim() - 2), group, 1)) @ values
    if decay is None:
        added = k.mT @ values
        before, after = _running_sum(added, state)
        outside = q @ before
    else:
        added = (k * _powers(decay, size - 1 - place)[:, None, :, None]).mT @ values
        before = _running_decayed_sum(added, decay**size, state)
        outside = (q * _powers(decay, place + 1)[:, None, :, None]) @ before
        last = length - (chunks - 1) * size  # the last chunk may be padded: its decay runs from the last true token
        tail = k[:, :, -1, :last] * _powers(decay, last - 1 - place[:last])[..., None]
        after = tail.mT @ values[:, :, -1, :last] + before[:, :, -1] * (decay**last).view(-1, 1, 1)
    summed = (inside + outside).view(batch, shared, chunks, group, size, values.shape[4])
    return summed.transpose(2, 3).reshape(batch, heads, chunks * size, values.shape[4])[:, :, :length], after


def chunk_size(width: int) -> int:
    """Tokens per chunk: work inside chunks grows with it, the number of states shrinks; balanced near the feature width."""
    return min(max(1 << (width - 1).bit_length(), 64), 512)


def _padded(x: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[2])) if length > x.shape[2] else x


def _running_sum(added: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """States before each chunk (B, Hk, chunks, F, Dv + 1), and the one after the last."""
    first = torch.zeros_like(added[:, :, :1]) if state is None else state[:, :, None]
    states = torch.cat([first, added], dim=2).cumsum(2)
    return states[:, :, :-1], states[:, :, -1]


def _running_decayed_sum(added: Tensor, decay: Tensor, state: Tensor | None) -> Tensor:
    current = torch.zeros_like(added[:, :, 0]) if state is None else state
    states = []
    for chunk in added.unbind(2):
        states.append(current)
        current = current * decay.view(-1, 1, 1) + chunk
    return torch.stack(states, dim=2)


def _poison(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor | None:
    """NaN where a row sees something that is not finite, else 0; None if everything is finite."""
    bad_q, bad_k, bad_v = (~x.detach().isfinite() for x in (q, k, v))
    if not torch.compiler.is_compiling() and not (bad_q.any() or bad_k.any() or bad_v.any()):
        return None
    bad_key = bad_k.any(-1, keepdim=True) | bad_v
    seen = bad_key.cummax(2).values if causal else bad_key.any(2, keepdim=True)
    seen = seen.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.where(seen | bad_q.any(-1, keepdim=True), torch.nan, 0.0).to(q.dtype)
