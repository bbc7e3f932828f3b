"""Linear attention whose features are exponentials, passed as logarithms: nothing overflows and no row
vanishes.

    a_ij = sum_f exp(q_if + k_jf) / sum_l sum_f exp(q_if + k_lf)

The state keeps for every feature f the largest k_jf so far, M_f, and sums of exp(k_jf - M_f): the sum for the
weights themselves is at least 1 once a key was seen. A row takes out its own largest q_if + M_f, and so has a
term of at least 1 in its total. Inside a chunk the weights are formed as logarithms and each row takes out
the largest that it sees. So the sizes of queries and keys do not matter, and no row depends on a later key,
not even by a maximum.

The state is (B, Hk, F, Dv + 2): sums of weighted values, sums of weights, M. A key that is masked is -inf.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unsoft.engines.linear.chunks import by_group, cut, in_order
from unsoft.tracing import readable, transform_name

_CHUNK = 64
"""Tokens per chunk: inside a chunk there are two exponentials and a logarithm for every pair."""
_EXACT_AT_ONCE = 1 << 22
"""Numbers that the slow, exact sum over features holds at a time."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, L, Dv) and the state after the last key; arguments as of
    :func:`unsoft.engines.linear.attention.linear_attention`.

    >>> q, k, v = (torch.randn(1, 2, 9, 3, dtype=torch.float64) for _ in range(3))
    >>> out, _ = attention(300 * q, 300 * k, v, causal=False)          # exp(300 q) alone would overflow
    >>> logits = torch.logsumexp(300 * (q[:, :, :, None] + k[:, :, None]), dim=-1)
    >>> torch.allclose(out, logits.softmax(-1) @ v)
    True
    """
    shared, group, length = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    q = largest_zero(q)
    after = state_after(k, v, state)
    if not causal or length == 1:
        rows = by_group(q, shared) + or_zero(after[..., -1])[:, :, None]
        # The sum of a feature is 0 if no key was seen, and its M was -inf. With the 0 that replaced it, the
        # feature could hold the largest exponent of a row, and all others would underflow.
        rows = torch.where(after[:, :, None, :, -2] == 0, -torch.inf, rows)
        e = (rows - or_zero(rows.amax(-1, keepdim=True)).detach()).exp()
        summed = e @ after[..., :-1]
        return _divided(summed[..., :-1], summed[..., -1:]).reshape(*q.shape[:3], -1), after
    size = min(_CHUNK, length)
    q, k, v = cut(q, size, shared), cut(k, size, filler=-torch.inf), cut(v, size)
    index = torch.arange(size, device=q.device)
    inside = log_products(q, k)
    inside = inside.reshape(*inside.shape[:3], group, size, size)
    inside = torch.where(index[:, None] >= index, inside, -torch.inf).flatten(3, 4)
    before = _states_before(k, v, state)
    rows = q + or_zero(before[..., -1])[:, :, :, None]
    rows = torch.where(before[:, :, :, None, :, -2] == 0, -torch.inf, rows)
    peak = torch.maximum(inside.detach().amax(-1, keepdim=True), rows.detach().amax(-1, keepdim=True))
    peak = or_zero(peak)
    weights = (inside - peak).exp()
    summed = (rows - peak).exp() @ before[..., :-1]
    out = summed[..., :-1] + weights @ v
    total = summed[..., -1:] + weights.sum(-1, keepdim=True)
    return in_order(_divided(out, total), group, length), after


def state_after(k: Tensor, v: Tensor, state: Tensor | None = None) -> Tensor:
    """Return the state after the keys (..., S, F) and values, and after those of an earlier state."""
    largest = k.detach().amax(-2)
    scaled = (k - or_zero(largest)[..., None, :]).exp()
    added = torch.cat([scaled.mT @ v, scaled.sum(-2)[..., None], largest[..., None]], dim=-1)
    return added if state is None else _joined(state, added)


def weights(q: Tensor, k: Tensor, visible: Tensor, bias: Tensor | None) -> Tensor:
    """Return the weights (B, H, L, S) written out."""
    logits = log_products(by_group(largest_zero(q), k.shape[1]), k).reshape(*q.shape[:3], k.shape[2])
    if bias is not None:
        logits = logits + torch.where(visible, bias, 0.0)
    logits = torch.where(visible, logits, -torch.inf)
    e = (logits - or_zero(logits.detach().amax(-1, keepdim=True))).exp()
    return _divided(e, e.sum(-1, keepdim=True))


def log_products(q: Tensor, k: Tensor) -> Tensor:
    """Return log sum_f exp(q_if + k_jf) for rows q (..., L, F) and k (..., S, F); -inf for masked keys.

    A product of matrices in float64 is enough unless a query and a key lie more than exp(600) apart from the
    best that each of them could meet; such pairs are summed one by one.
    """
    masked = k.detach().amax(-1) == -torch.inf
    k = torch.where(masked[..., None], 0.0, k)
    top_q, top_k = (x.detach().amax(-1, keepdim=True) for x in (q, k))
    wide = torch.float32 if q.device.type == "mps" else torch.float64
    products = (q - top_q).to(wide).exp() @ (k - top_k).to(wide).exp().mT
    # Smaller products have terms below the smallest normal number, which have lost digits.
    least = torch.finfo(wide).tiny / torch.finfo(wide).eps
    logs = products.clamp(min=least).log().to(q.dtype) + top_q + top_k.mT
    if not torch.compiler.is_compiling():  # which cannot ask for values while tracing
        lost = (products < least) & ~masked[..., None, :]
        if not readable(lost) or bool(lost.any()):
            logs = torch.where(lost, _summed_one_by_one(q, k), logs)
    return torch.where(masked[..., None, :], -torch.inf, logs)


def _summed_one_by_one(q: Tensor, k: Tensor) -> Tensor:
    rows = max(_EXACT_AT_ONCE // max(k.numel(), 1), 1)

    def logs(part: Tensor, k: Tensor) -> Tensor:
        return (part[..., :, None, :] + k[..., None, :, :]).logsumexp(-1)

    parts = torch.split(q, rows, dim=-2)
    if transform_name():  # which does not support checkpoints
        return torch.cat([logs(part, k) for part in parts], dim=-2)
    return torch.cat([checkpoint(logs, part, k, use_reentrant=False) for part in parts], dim=-2)


def _states_before(k: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    """Return the state before each chunk (B, Hk, chunks, F, Dv + 2)."""
    added = state_after(k, v)
    if state is None:
        state = torch.zeros_like(added[:, :, 0])
        state[..., -1] = -torch.inf
    states = [state]
    for chunk in added.unbind(2)[:-1]:
        states.append(_joined(states[-1], chunk))
    return torch.stack(states, dim=2)


def _joined(a: Tensor, b: Tensor) -> Tensor:
    largest = torch.maximum(a[..., -1:], b[..., -1:])
    shift = or_zero(largest)
    one, other = (x[..., :-1] * (x[..., -1:] - shift).exp() for x in (a, b))
    return torch.cat([one + other, largest], dim=-1)


def largest_zero(q: Tensor) -> Tensor:
    """Return logarithms of a query's features with the largest shifted to 0, which normalising undoes.

    Otherwise the sums of a query of 10,000 with keys would keep three digits after the point in float32.
    """
    return q - q.detach().amax(-1, keepdim=True)


def or_zero(x: Tensor) -> Tensor:
    """Return ``x`` with 0 for -inf, the maximum of nothing."""
    return torch.where(x == -torch.inf, 0.0, x)


def _divided(x: Tensor, total: Tensor) -> Tensor:
    """Return x / total, and 0 for rows that see nothing; any other total is about 1 or more."""
    nothing = total == 0
    return torch.where(nothing, 0.0, x / torch.where(nothing, 1.0, total))
