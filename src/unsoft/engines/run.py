"""Runs a formula on tensors as a user gives them: checks, autocast, choice of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unsoft.engines import POINTWISE
from unsoft.engines.arguments import checked_call
from unsoft.engines.dense import dense_attention
from unsoft.engines.inputs import as_autocast, device_type
from unsoft.engines.native.direct import run_directly
from unsoft.engines.registry import check_return_weights
from unsoft.engines.threads import threads_are_used
from unsoft.formula import Formula

_COMPILED = ("auto", "native")


def run_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    engine: str = "auto",
    return_weights: bool = False,
    params: Mapping[str, float | Tensor] | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What :func:`unsoft.attention` does for a formula."""
    plain = attn_mask is None and params is None and positions is None and return_weights is False
    plain = plain and engine in _COMPILED and type(dropout_p) is float and dropout_p == 0.0
    # The tracer of torch.compile must not look into the short way.
    if plain and not torch.compiler.is_compiling():
        out = run_directly(query, key, value, formula, is_causal, scale, enable_gqa, fields)
        if out is not None:
            return out
    POINTWISE.check(engine)
    check_return_weights(return_weights, engine)
    options = {
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "params": params,
        "positions": positions,
        "fields": fields,
    }
    if torch.is_autocast_enabled(device_type(query)):
        query, key, value = as_autocast(query, key, value)
        with torch.autocast(device_type(query), enabled=False):
            return _run(query, key, value, formula, engine, return_weights, options)
    return _run(query, key, value, formula, engine, return_weights, options)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    engine: str,
    return_weights: bool,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    threads_are_used()
    call, leading = checked_call(query, key, value, formula, **options)
    if return_weights:
        out, weights = dense_attention(call)
        return out.reshape(*leading, *out.shape[2:]), weights.reshape(*leading, *weights.shape[2:])
    out = POINTWISE.choose(engine, call).run(call)
    return out.reshape(*leading, *out.shape[2:])
