"""The weights behind an attention call, computed a second time beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unsoft.hf.inspection.visible import Visible
from unsoft.mechanisms.module import Mechanism


def softmax_rows(
    query: Tensor, key: Tensor, scale: float, visible: Tensor | None, bias: Tensor | None = None, softcap: float | None = None
) -> Tensor:  # fmt: skip
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


def own_mechanism(module: nn.Module) -> Mechanism | None:
    """The mechanism that was swapped into an attention module, None if it has its stock attention."""
    return next((child for child in module.children() if isinstance(child, Mechanism)), None)


def mechanism_weights(
    mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor, content_keys: Tensor, visible: Visible, scale: float
) -> Tensor:  # fmt: skip
    """Weights (heads, n, n) of a swapped mechanism for one sequence; they exist at once, for one sequence of one layer."""
    causal = visible.kind == "causal"
    _, weights = mechanism(
        query[None], key[None], value[None], None if causal or visible.table is None else visible.table[None],
        is_causal=causal, scale=scale, enable_gqa=len(query) != len(key), return_weights=True,
        geometry_keys=None if content_keys is key else content_keys[None],
    )  # fmt: skip
    return weights[0]
