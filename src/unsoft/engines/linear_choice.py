"""Which engine runs a call of linear attention; a name that cannot is refused with the reason.

native  compiled code, from token to token    causal, without masks, dropout and gradient; CPU
tiled   torch operations on chunks            everything, any device; linear memory
dense   torch operations                      weights written out; quadratic memory
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsoft.engines import check_name
from unsoft.engines.call import Call
from unsoft.engines.native.direct import observed
from unsoft.engines.native.recurrence import recurrence_ready

STEP = 16
"""Up to this many tokens at a time, compiled code is faster than chunks."""


def choose_linear(
    engine: str,
    call: Call,
    state: Tensor | None,
    decay: Tensor | None,
    *,
    cached: bool = False,
    weights: bool = False,
) -> str:
    """ "native", "tiled" or "dense"; ``cached``: the tokens continue a state; ``weights``: they are asked for too."""
    check_name(engine)
    if weights and engine not in ("auto", "dense"):
        raise ValueError(
            f"attention: argument 'return_weights' needs engine 'dense' or 'auto', not {engine!r}"
        )
    if weights:
        return "dense"
    small = cached and call.q.shape[2] <= STEP
    if engine == "native" or (engine == "auto" and small):
        reason = _masked(call) or _not_compiled(call.q, call.k, call.v, state, decay)
        if reason is None and recurrence_ready(call.q.dtype == torch.float64):
            return "native"
        if reason is not None and engine == "native":
            raise ValueError(_refused(engine, reason))
        return "tiled"
    if engine == "sdpa":
        raise ValueError(_refused(engine, "it computes softmax, and this is linear attention"))
    if engine == "dense" and cached:
        raise ValueError(
            _refused(engine, "a cache of fixed size does not keep the keys that weights belong to")
        )
    return "dense" if engine == "dense" else "tiled"


def is_small_step(options: dict[str, Any], *tensors: Tensor | None) -> bool:
    """May a step whose shapes have been checked run compiled code? ``tensors``: query, key, value and what else takes part."""
    return (
        options["attn_mask"] is None
        and options["positions"] is None
        and options["dropout_p"] == 0
        and options["engine"] in ("auto", "native")
        and _not_compiled(*tensors) is None
    )


def _refused(engine: str, reason: str) -> str:
    return f"attention: argument 'engine': {engine!r} does not support this call: {reason}"


def _masked(call: Call) -> str | None:
    if call.visible is not None or call.bias is not None or call.dropout_p > 0:
        return "its compiled code knows no masks and no dropout; use 'tiled'"
    if call.positions is not None:
        return "its compiled code counts positions from 0; use 'tiled'"
    if call.causal_offset != 0 or call.q.shape[2] != call.k.shape[2]:
        return "its compiled code goes from token to token: as many queries as keys and is_causal=True; use 'tiled'"
    return None


def _not_compiled(*tensors: Tensor | None) -> str | None:
    """Why compiled code cannot run on these tensors, if so."""
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into compiled code; use 'tiled'"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return "its compiled code has no gradient; use 'tiled', or torch.no_grad()"
    if tensors[0] is not None and tensors[0].device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {tensors[0].device}; use 'tiled'"
    if observed():
        return "compiled code goes past torch's modes and torch.func transforms; use 'tiled', or 'dense'"
    return None
