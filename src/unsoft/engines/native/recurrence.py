"""Linear attention by compiled code, token by token: decoding,
where many small torch calls would take longer than the work."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from unsoft.engines.linear.attention import vanishing
from unsoft.engines.native.availability import failure
from unsoft.engines.native.compiler import KERNEL, load_libraries
from unsoft.engines.threads import thread_count

MAPS = {"identity": 0, "relu": 1, "elu1": 2, "cosine": 3}
"""Feature maps that the compiled code knows; others are applied before."""
_CALL = struct.Struct("21q4d")
_NOT_FINITE, _OUT_OF_MEMORY = 1, 2


@lru_cache(maxsize=2)
def _function(double: bool) -> Callable[[bytes], int]:
    source = (KERNEL / "recurrence.cpp").read_text()
    (library,) = load_libraries({"recurrence": source}, "double" if double else "float")
    function: Callable[[bytes], int] = library.unsoft_recurrence
    return function


def recurrence_failure(double: bool) -> str | None:
    """Why there is no compiled code for float32, or float64 if ``double``; None if there is."""
    return failure(("recurrence", double), lambda: _function(double))


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
    """What :func:`unsoft.engines.linear.attention.linear_attention` gives for a causal call,
    or None if something is not finite.

    q, k, v are float32 or float64 on the CPU; ``feature_map`` is applied to them times ``scales`` ("cosine":
    see cosformer, whose positions begin at ``first`` and whose M is ``limit``). The state given is not
    changed.

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
    call = _CALL.pack(
        thread_count(),
        batch,
        heads,
        key_heads,
        state_heads,
        tokens,
        width,
        values,
        features,
        MAPS[feature_map],
        normalise,
        logarithmic,
        first,
        limit,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        0 if decay is None else decay.data_ptr(),
        0 if state is None else state.data_ptr(),
        after.data_ptr(),
        out.data_ptr(),
        *scales,
        math.pi / 2 / limit,
        vanishing(q.dtype),
    )
    status = _function(q.dtype == torch.float64)(call)
    if status == _OUT_OF_MEMORY:
        raise MemoryError("unsoft's native engine could not allocate its buffers")
    return None if status == _NOT_FINITE else (out, after)
