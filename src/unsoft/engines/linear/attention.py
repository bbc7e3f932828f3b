"""Linear attention: weights that are products of features, computed in time and memory linear in the length.

    a_ij = d^(i-j) f(q_i) . h(k_j) / normaliser_i    j <= i if causal    d: decay of the head, or 1

The engine gets the features f(q), h(k) and never forms the (L, S) matrix: the causal sum over j is cut into
chunks; inside a chunk the weights are formed, everything before it is one matrix sum_j d^(..) h(k_j) v_j^T
per head, the state. The state is also all that decoding needs, whatever the position. Plain differentiable
torch; what autograd keeps grows linearly.

Shapes: q (B, H, L, F), k (B, Hk, S, F), v (B, Hk, S, Dv); H is a multiple of Hk. The normaliser is carried
along as one more column of the values, which is 1 everywhere. Features that are exponentials come as
logarithms (``logarithmic``) and are summed by logarithms.py, which cannot overflow or vanish.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.linear import logarithms
from unsoft.engines.linear.chunks import by_group, chunk_size, cut, in_order, padded

Sums = Callable[..., tuple[Tensor, Tensor]]
"""Signature of :func:`linear_attention`."""


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    normalise: bool,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    logarithmic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, L, Dv) and the state (B, heads, F, Dv + 1) after the last key, whose last
    column sums the keys themselves.

    A causal call aligns row i with key i (L = S); ``state`` continues from earlier keys. All inputs are
    finite: the caller applies the rules for NaN and for masks.

    >>> q, k, v = (torch.rand(1, 2, 6, 3, dtype=torch.float64) for _ in range(3))
    >>> whole, _ = linear_attention(q, k, v, causal=True, normalise=True)
    >>> first = (x[:, :, :4] for x in (q, k, v))
    >>> first, state = linear_attention(*first, causal=True, normalise=True)
    >>> rest = (x[:, :, 4:] for x in (q, k, v))
    >>> rest, _ = linear_attention(*rest, causal=True, normalise=True, state=state)
    >>> torch.allclose(torch.cat([first, rest], dim=2), whole)
    True
    """
    if logarithmic:
        return logarithms.attention(q, k, v, causal=causal, state=state)
    heads, shared = q.shape[1], k.shape[1]
    if normalise:
        q = largest_one(q)
    if decay is not None and heads != shared:  # a state that decays belongs to a query head
        k, v = (x.repeat_interleave(heads // shared, dim=1) for x in (k, v))
        shared = heads
    if causal and q.shape[2] > 1:
        out, total, after = _chunked(q, k, v, decay, state)
    else:
        after = state_after(k, v, decay, state)
        summed = (by_group(q, shared) @ after).reshape(*q.shape[:3], -1)
        out, total = summed[..., :-1], summed[..., -1:]
    return _divided(out, total) if normalise else out, after


def aligned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offset: int | None,
    normalise: bool,
    decay: Tensor | None = None,
    logarithmic: bool = False,
    sums: Sums = linear_attention,
) -> Tensor:
    """Return the output for any number of queries and keys: key j is visible to row i iff j <= i + offset, or
    always if that is None. ``sums``: :func:`linear_attention`, or that of an engine."""
    options: dict[str, Any] = {"normalise": normalise, "decay": decay, "logarithmic": logarithmic}
    if offset is None:
        return sums(q, k, v, causal=False, **options)[0]
    length, state = q.shape[2], None
    blind = min(max(-offset, 0), length)  # rows that see nothing
    q = q[:, :, blind:]
    if offset > 0:  # keys that every row sees: they are in the state before the first row
        if decay is not None and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        before = k[:, :, :offset], v[:, :, :offset]
        state = logarithms.state_after(*before) if logarithmic else state_after(*before, decay)
        k, v = k[:, :, offset:], v[:, :, offset:]
    if q.shape[2] == 0:
        return q.new_zeros(*q.shape[:2], length, v.shape[3])
    k = padded(k[:, :, : q.shape[2]], q.shape[2], -torch.inf if logarithmic else 0.0)
    v = padded(v[:, :, : q.shape[2]], q.shape[2])
    out, _ = sums(q, k, v, causal=True, state=state, **options)
    return torch.nn.functional.pad(out, (0, 0, blind, 0)) if blind else out


def state_after(k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None) -> Tensor:
    """Return the state after all the keys: sum_j d^(S-1-j) h(k_j) [v_j, 1]^T, plus d^S times the state before
    them."""
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
    visible: Tensor,
    *,
    offset: int | None,
    normalise: bool,
    decay: Tensor | None = None,
    bias: Tensor | None = None,
    logarithmic: bool = False,
) -> Tensor:
    """Return the weights (B, H, L, S) written out: the specification of :func:`linear_attention`, for
    inspection and for masks.

    ``visible`` is bool and broadcasts to the weights; ``bias`` multiplies them by exp(bias) before they are
    normalised. ``offset``: row i is at the position of key i + offset, for the decay.
    """
    if logarithmic:
        return logarithms.weights(q, k, visible, bias)
    batch, heads, length, _ = q.shape
    keys = k.shape[2]
    if normalise:
        q = largest_one(q)
    weights = (by_group(q, k.shape[1]) @ k.mT).reshape(batch, heads, length, keys)
    if decay is not None:
        rows = torch.arange(length, device=q.device)[:, None] + (offset or 0)
        distance = rows - torch.arange(keys, device=q.device)
        weights = weights * _powers(decay, distance.clamp(min=0))
    if bias is not None:
        if normalise:  # exp of the largest would overflow; taken out of the whole row, it cancels
            seen = torch.where(visible, bias, -torch.inf).amax(-1, keepdim=True)
            bias = bias - torch.where(seen.isfinite(), seen, 0.0).detach()
        weights = weights * torch.where(visible, bias, 0.0).exp()
    weights = torch.where(visible, weights, 0.0)
    return _divided(weights, weights.sum(-1, keepdim=True)) if normalise else weights


def vanishing(dtype: torch.dtype) -> float:
    """Return the bound below which a divisor counts as 0: gradients of a quotient by less would overflow."""
    # Autograd divides twice, (x / by) / by. The quotient is about as large as a value, so 1 / by may be as
    # large as eps / tiny = 1e31 in float32. At tiny itself it would be 1e38, and the product would overflow.
    facts = torch.finfo(dtype)
    return facts.tiny / facts.eps


def largest_one(q: Tensor) -> Tensor:
    """Return features of queries with the largest of a row scaled to 1, which normalising undoes: no size is
    too small or large."""
    largest = q.detach().abs().amax(-1, keepdim=True)
    return q / torch.where(largest < vanishing(q.dtype), 1.0, largest)


def _divided(x: Tensor, by: Tensor) -> Tensor:
    """Return x / by, and 0 with gradient 0 where ``by`` vanishes."""
    gone = by.abs() < vanishing(by.dtype)
    return torch.where(gone, 0.0, x / torch.where(gone, 1.0, by))


def _powers(decay: Tensor, exponents: Tensor) -> Tensor:
    """Return decay ** exponents, (H, *exponents.shape); the exponents are non-negative integers."""
    return decay.view(-1, *(1,) * exponents.dim()) ** exponents


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums over the keys of each row, of weighted values (B, H, L, Dv) and of weights (B, H, L, 1),
    and the state after them."""
    shared, group, length = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    size = min(chunk_size(q.shape[3]), length)
    after = state_after(k, v, decay, state)
    q, k, v = cut(q, size, shared), cut(k, size), cut(v, size)
    chunks = q.shape[2]

    index = torch.arange(size, device=q.device)
    weights = (q @ k.mT).reshape(*q.shape[:3], group, size, size)
    weights = (weights.tril() if decay is None else weights * _decay_inside(decay, index)).flatten(3, 4)
    fading = None if decay is None else decay**size
    if decay is not None:
        # Exponents are >= 0 everywhere, so factors are at most 1. Factoring d^(i-j) as d^i d^(-j) would
        # overflow: 0.5^(-128) is the end of float32.
        k = k * _powers(decay, size - 1 - index)[:, None, :, None]
        q = q * _powers(decay, index + 1)[:, None, :, None]
    before, before_keys = (_running_sum(x, fading) for x in (k.mT @ v, k.sum(3)))
    if state is not None:
        earlier = state[:, :, None]
        if decay is not None:
            earlier = earlier * _powers(decay, size * torch.arange(chunks, device=q.device))[..., None, None]
        before, before_keys = before + earlier[..., :-1], before_keys + earlier[..., -1]
    out = weights @ v + q @ before
    total = weights.sum(4, keepdim=True) + q @ before_keys[..., None]
    return in_order(out, group, length), in_order(total, group, length), after


def _decay_inside(decay: Tensor, index: Tensor) -> Tensor:
    """Return d^(i-j) for j <= i in a chunk, else 0: (H, 1, 1, size, size)."""
    distance = index[:, None] - index
    return torch.where(distance >= 0, _powers(decay, distance.clamp(min=0)), 0.0)[:, None, None]


def _running_sum(added: Tensor, decay: Tensor | None) -> Tensor:
    """Return the sums over the chunks (dimension 2) before each chunk.

    A loop: torch's cumsum is slow along an outer dimension.
    """
    current = torch.zeros_like(added[:, :, 0])
    factor = 1.0 if decay is None else decay.view(-1, *(1,) * (added.dim() - 3))
    sums = []
    for chunk in added.unbind(2):
        sums.append(current)
        current = current * factor + chunk
    return torch.stack(sums, dim=2)
