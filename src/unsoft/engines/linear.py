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


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, normalise: bool, decay: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, L, Dv) and the state (B, heads, F, Dv + 1) after the last key; its last column sums the keys themselves.

    A causal call aligns row i with key i (L = S); ``state`` continues from earlier keys. All inputs are finite: rules for NaN
    and for masks are the caller's.

    >>> q, k, v = (torch.rand(1, 2, 6, 3, dtype=torch.float64) for _ in range(3))
    >>> whole, _ = linear_attention(q, k, v, causal=True, normalise=True)
    >>> first, state = linear_attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], causal=True, normalise=True)
    >>> rest, _ = linear_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], causal=True, normalise=True, state=state)
    >>> torch.allclose(torch.cat([first, rest], dim=2), whole)
    True
    """
    heads, shared = q.shape[1], k.shape[1]
    if decay is not None and heads != shared:  # a state that decays belongs to a query head
        k, v = (x.repeat_interleave(heads // shared, dim=1) for x in (k, v))
        shared = heads
    if causal and q.shape[2] > 1:
        out, total, after = _chunked(q, k, v, decay, state)
    else:
        after = state_after(k, v, decay, state)
        summed = (_by_group(q, shared) @ after).reshape(*q.shape[:3], -1)
        out, total = summed[..., :-1], summed[..., -1:]
    return _divided(out, total) if normalise else out, after


def aligned_attention(
    q: Tensor, k: Tensor, v: Tensor, *, offset: int | None, normalise: bool, decay: Tensor | None = None
) -> Tensor:
    """Output for any number of queries and keys: key j is visible to row i iff j <= i + offset, or always if that is None."""
    if offset is None:
        return linear_attention(q, k, v, causal=False, normalise=normalise, decay=decay)[0]
    length, state = q.shape[2], None
    blind = min(max(-offset, 0), length)  # rows that see nothing
    q = q[:, :, blind:]
    if offset > 0:  # keys that every row sees: they are in the state before the first row
        if decay is not None and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        state = state_after(k[:, :, :offset], v[:, :, :offset], decay)
        k, v = k[:, :, offset:], v[:, :, offset:]
    k, v = (_padded(x[:, :, : q.shape[2]], q.shape[2]) for x in (k, v))
    out, _ = linear_attention(q, k, v, causal=True, normalise=normalise, decay=decay, state=state)
    return torch.nn.functional.pad(out, (0, 0, blind, 0)) if blind else out


def state_after(k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None) -> Tensor:
    """The state after all the keys given: sum_j d^(S-1-j) h(k_j) [v_j, 1]^T, plus d^S times the state before them."""
    length = k.shape[2]
    if decay is not None and length > 1:
        k = k * _powers(decay, torch.arange(length - 1, -1, -1, device=k.device))[..., None]
    added = torch.cat([k.mT @ v, k.sum(2)[..., None]], dim=3)
    if state is None:
        return added
    return added + (state if decay is None else state * (decay**length).view(-1, 1, 1))


def linear_weights(
    q: Tensor,
    k: Tensor,
    *,
    offset: int | None,
    normalise: bool,
    decay: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """The weights (B, H, L, S) written out: the specification of :func:`linear_attention`, for looking at and for masks.

    Key j is visible to row i if ``offset`` is None or j <= i + offset; ``factor`` multiplies the weights before they are
    normalised (0 = masked).
    """
    batch, heads, length, _ = q.shape
    keys = k.shape[2]
    weights = (_by_group(q, k.shape[1]) @ k.mT).reshape(batch, heads, length, keys)
    if offset is not None:
        distance = (
            torch.arange(length, device=q.device)[:, None] + offset - torch.arange(keys, device=q.device)
        )
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


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the keys of each row: of weighted values (B, H, L, Dv), of weights (B, H, L, 1); and the state after."""
    batch, heads, length, width = q.shape
    shared, group = k.shape[1], heads // k.shape[1]
    size = min(chunk_size(width), length)
    chunks = -(-length // size)
    after = state_after(k, v, decay, state)
    q = _padded(q, chunks * size).view(batch, shared, group, chunks, size, width)
    q = q.transpose(2, 3).reshape(batch, shared, chunks, group * size, width)
    k = _padded(k, chunks * size).view(batch, shared, chunks, size, width)
    v = _padded(v, chunks * size).view(batch, shared, chunks, size, v.shape[3])

    place = torch.arange(size, device=q.device)
    weights = (q @ k.mT).view(batch, shared, chunks, group, size, size)
    weights = weights.tril() if decay is None else weights * _decay_inside(decay, place)
    weights = weights.view(batch, shared, chunks, group * size, size)
    fading = None if decay is None else decay**size
    if decay is not None:
        k = k * _powers(decay, size - 1 - place)[:, None, :, None]
        q = q * _powers(decay, place + 1)[:, None, :, None]
    before, before_keys = (_running_sum(x, fading) for x in (k.mT @ v, k.sum(3)))
    if state is not None:
        earlier = state[:, :, None]
        if decay is not None:
            earlier = earlier * _powers(decay, size * torch.arange(chunks, device=q.device))[..., None, None]
        before, before_keys = before + earlier[..., :-1], before_keys + earlier[..., -1]
    out = weights @ v + q @ before
    total = weights.sum(4, keepdim=True) + q @ before_keys[..., None]

    def in_order(x: Tensor) -> Tensor:
        by_group = x.view(batch, shared, chunks, group, size, x.shape[4])
        return by_group.transpose(2, 3).reshape(batch, heads, chunks * size, x.shape[4])[:, :, :length]

    return in_order(out), in_order(total), after


def _decay_inside(decay: Tensor, place: Tensor) -> Tensor:
    """d^(i-j) for j <= i in a chunk, else 0: (H, 1, 1, size, size)."""
    distance = place[:, None] - place
    return torch.where(distance >= 0, _powers(decay, distance.clamp(min=0)), 0.0)[:, None, None]


def chunk_size(width: int) -> int:
    """Tokens per chunk: work inside chunks grows with it, the number of states shrinks; balanced near the feature width."""
    return min(max(1 << (width - 1).bit_length(), 64), 512)


def _padded(x: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[2])) if length > x.shape[2] else x


def _running_sum(added: Tensor, decay: Tensor | None) -> Tensor:
    """Sums over the chunks (dimension 2) before each chunk. A loop: torch's cumsum is slow along an outer dimension."""
    current = torch.zeros_like(added[:, :, 0])
    factor = 1.0 if decay is None else decay.view(-1, *(1,) * (added.dim() - 3))
    sums = []
    for chunk in added.unbind(2):
        sums.append(current)
        current = current * factor + chunk
    return torch.stack(sums, dim=2)
