"""Linear attention by compiled code, token by token, for decoding: there many small torch calls would take
longer than the arithmetic."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from unsoft.engines.linear.attention import vanishing
from unsoft.engines.native.availability import library
from unsoft.engines.native.binding import address, check_status
from unsoft.engines.threads import thread_count

MAPS = {"identity": 0, "relu": 1, "elu1": 2, "cosine": 3}
"""Feature maps of the compiled code; others are applied before."""
_CALL = struct.Struct("21q4d")
_NOT_FINITE = 1


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    *,
    normalise: bool,
    feature_map: str = "identity",
    decay: Tensor | None = None,
    logarithmic: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    first: int = 0,
    limit: int = 1,
) -> tuple[Tensor, Tensor] | None:
    """Return what :func:`unsoft.engines.linear.attention.linear_attention` does for a causal call,
    or None if something is not finite.

    q, k, v are float32 or float64 on the CPU; ``feature_map`` is applied to them times ``scales`` ("cosine":
    see cosformer, whose positions begin at ``first`` and whose M is ``limit``). ``state`` is not changed.

    >>> q, k, v = (torch.rand(1, 2, 5, 3) for _ in range(3))
    >>> out, state = recurrence(q, k, v, None, normalise=True)
    >>> from unsoft.engines.linear.attention import linear_attention
    >>> torch.allclose(out, linear_attention(q, k, v, causal=True, normalise=True)[0])
    True
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (batch, heads, tokens, width), (_, key_heads, _, values) = q.shape, v.shape
    features = 2 * width if feature_map == "cosine" else width
    state_heads = key_heads if decay is None else heads
    if state is not None:
        state = state.contiguous()
    after = q.new_empty(batch, state_heads, features, values + (2 if logarithmic else 1))
    out = q.new_empty(batch, heads, tokens, values)
    sizes = (batch, heads, key_heads, state_heads, tokens, width, values, features)
    flags = (MAPS[feature_map], normalise, logarithmic, first, limit)
    addresses = (address(x) for x in (q, k, v, decay, state, after, out))
    numbers = (*scales, math.pi / 2 / limit, vanishing(q.dtype))
    call = _CALL.pack(thread_count(), *sizes, *flags, *addresses, *numbers)
    status = check_status(library("recurrence", q.dtype == torch.float64).unsoft_recurrence(call))
    return None if status == _NOT_FINITE else (out, after)
