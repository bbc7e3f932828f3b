"""The weights behind an attention call, computed a second time beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unsoft.hf.attention import NAME, Swapped
from unsoft.lab.interpret.inspection.visible import Visible


def softmax_rows(
    query: Tensor,
    key: Tensor,
    scale: float,
    visible: Tensor | None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Weights (heads, rows, keys) of stock attention for some of its rows.

        s = scale q . k        softcap: s = c tanh(s / c)        a = softmax(s + bias over visible keys)

    ``key`` may have fewer heads than ``query``. A row that sees nothing has weights 0.

    >>> softmax_rows(torch.zeros(2, 1, 4), torch.zeros(1, 2, 4), 0.5, None)
    tensor([[[0.5000, 0.5000]],
            [[0.5000, 0.5000]]])
    """
    heads, rows, dim = query.shape
    shared = query.reshape(len(key), -1, dim)
    logits = (shared @ key.mT).mul_(scale).view(heads, rows, -1)
    if softcap is not None:
        logits = (logits / softcap).tanh_().mul_(softcap)
    if bias is not None:
        logits += bias
    if visible is None:
        return logits.softmax(-1)
    weights = logits.masked_fill_(~visible, torch.finfo(logits.dtype).min).softmax(-1)
    return weights if bool(visible.any(-1).all()) else torch.where(visible, weights, 0.0)


def swapped_in(module: nn.Module) -> Swapped | None:
    """What :func:`unsoft.hf.swap` put into an attention module, None if it has its stock attention."""
    found = getattr(module, NAME, None)
    return found if isinstance(found, Swapped) else None


def swapped_weights(
    swapped: Swapped, query: Tensor, key: Tensor, value: Tensor, visible: Visible, causal: bool, scale: float
) -> Tensor:
    """Weights (heads, n, n) of a swapped mechanism for one sequence; they exist at once, for one sequence of
    one layer."""
    table = visible.table[None] if visible.kind == "other" and visible.table is not None else None
    weights: Tensor
    _, weights = swapped(
        query[None],
        key[None],
        value[None],
        table,
        causal=causal,
        scale=scale,
        dropout=0.0,
        window=None,
        return_weights=True,
    )
    return weights[0]
