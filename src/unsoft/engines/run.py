"""Runs a formula on tensors as a user gives them: checks, autocast, choice of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unsoft.engines import choose
from unsoft.engines.arguments import checked_call
from unsoft.engines.dense import dense_attention
from unsoft.engines.threads import threads_are_used
from unsoft.formula import Formula


def run_formula(
    query: Tensor, key: Tensor, value: Tensor, formula: Formula, *, engine: str = "auto", return_weights: bool = False,
    params: Mapping[str, float | Tensor] | None = None, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """What :func:`unsoft.attention` does for a formula; ``options`` are its remaining arguments."""
    if return_weights and engine not in ("auto", "dense"):
        raise ValueError(
            f"attention: argument 'return_weights' needs engine 'dense' or 'auto', not {engine!r}"
        )
    options = {"params": params, **options}
    if torch.is_autocast_enabled(_device_type(query)):
        query, key, value = (_as_autocast(x, query) for x in (query, key, value))
        with torch.autocast(_device_type(query), enabled=False):
            return _run(query, key, value, formula, engine, return_weights, options)
    return _run(query, key, value, formula, engine, return_weights, options)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    engine: str,
    return_weights: bool,
    options: dict,
) -> Tensor | tuple[Tensor, Tensor]:
    threads_are_used()
    call, leading = checked_call(query, key, value, formula, **options)
    if return_weights:
        out, weights = dense_attention(call)
        return out.reshape(*leading, *out.shape[2:]), weights.reshape(*leading, *weights.shape[2:])
    out = choose(engine, call).run(call)
    return out.reshape(*leading, *out.shape[2:])


def _device_type(x: Any) -> str:
    return x.device.type if isinstance(x, Tensor) else "cpu"


def _as_autocast(x: Any, query: Any) -> Any:
    """What autocast does to the inputs of torch's attention; the arithmetic inside keeps its precision."""
    narrow = isinstance(x, Tensor) and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return x.to(torch.get_autocast_dtype(_device_type(query))) if narrow else x
