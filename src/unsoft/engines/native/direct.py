"""The fast path to the compiled kernel, for calls that need nothing else: decoding makes thousands of small
ones.

What depends only on the formula, the shape of the queries and the flags is prepared once (:class:`Plan`);
what may change from call to call (the number of keys, addresses) is compared with it. Anything unusual (a
wrong argument, a gradient, a transform, a mask, NaN) is left to the general path, which has all rules and
messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from unsoft.engines.call import compute_dtype
from unsoft.engines.field_tables import Tables, field_tables
from unsoft.engines.native import binding
from unsoft.engines.native.availability import formula_failure
from unsoft.formula import Formula

_ALIGNMENTS = (False, True, "upper_left", "lower_right")
_SCALES = (float, type(None))
_MOST_PLANS = 512
_plans: dict[tuple[object, ...], Plan] = {}


def observed() -> bool:
    """Return True if a mode, a transform, a tracer or autocast is active, which has to see every torch
    operation. Compiled code would bypass it."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


class Plan:
    """Arguments that stay the same between calls. It keeps alive the tensors whose addresses it holds."""

    def __init__(self, formula: Formula, query: Tensor, scale: float | None) -> None:
        self.formula = formula
        self.shape = query.shape
        self.scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else float(scale)
        self.kernel = binding.kernel(formula.key, query.dtype)
        defaults = [formula.params[name] for name in sorted(formula.params)]
        self.parameters = torch.tensor([defaults] * query.shape[1], dtype=compute_dtype(query.dtype))
        self.rest = binding.pack_rest(None, None, (None,) * 5, self.parameters)


def run_directly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    is_causal: bool | str,
    scale: float | None,
    enable_gqa: bool,
    fields: Mapping[str, Any] | None = None,
    wide: bool = False,
) -> Tensor | None:
    """Return the output, or None if the call has to take the general path."""
    try:
        plan = plan_of(query, key, value, formula, is_causal, scale, enable_gqa, with_fields=True)
        if plan is None:
            return None
        tables: Tables = (None, None)
        if formula.symbols.all or fields is not None:
            batch, dtype = plan.shape[:1], plan.parameters.dtype
            tables = field_tables(formula, fields, query, key, batch, plan.scale, dtype)
            if not all(_usual(table) for table in tables):
                return None
        out = (plan.parameters if wide else query).new_empty((*plan.shape[:3], value.shape[3]))
        call = pack_call(plan, query, key, value, out, key.shape[2], is_causal, tables)
    except (RuntimeError, TypeError, ValueError):  # not of four dimensions, sparse, nested, wrong fields
        return None
    return out if plan.kernel.forward(call) == binding.FINITE else None


def _usual(table: Tensor | None) -> bool:
    """Return True if the kernel can read the table in place, and nobody needs its gradient."""
    if table is None:
        return True
    needs_grad = table.requires_grad and torch.is_grad_enabled()
    return type(table) is Tensor and table.stride(3) == 1 and not needs_grad and not table.is_neg()


def plan_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    is_causal: bool | str,
    scale: float | None,
    enable_gqa: bool,
    with_fields: bool = False,
) -> Plan | None:
    """Return the plan of a call without anything unusual, else None. ``with_fields``: the caller packs the
    fields of the formula."""
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor or observed():
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    if formula.symbols.all and not with_fields:
        return None
    if type(is_causal) not in (bool, str) or type(enable_gqa) is not bool or type(scale) not in _SCALES:
        return None
    dtype = query.dtype
    plan = _plan(query, dtype, formula, is_causal, scale)
    if plan is None or key.dtype is not dtype or value.dtype is not dtype:
        return None
    batch, heads, _, width = plan.shape
    key_batch, shared, keys, key_width = key.shape
    value_batch, value_heads, values, value_width = value.shape
    fits = (key_batch, key_width, value_batch, value_heads, values) == (batch, width, batch, shared, keys)
    if not fits or not keys or not value_width or not (key.is_cpu and value.is_cpu):
        return None
    if heads != shared and not (enable_gqa and shared and heads % shared == 0):
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():  # they store the negated values
        return None
    return plan


def pack_call(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    keys: int,
    is_causal: bool | str,
    fields: Tables = (None, None),
) -> bytes:
    """Return struct Call for an output that is not yet computed. ``fields``: of queries and of keys, (F, B,
    H, length)."""
    offset = keys - plan.shape[2] if is_causal == "lower_right" else 0 if is_causal else None
    numbers = (0, 0, 0, 1.0, plan.scale)  # no dropout
    inputs = binding.pack_inputs(plan.kernel, query, key, value, out, keys, offset, numbers)
    if fields[0] is None and fields[1] is None:
        return inputs + plan.rest
    return inputs + binding.pack_rest(None, None, (None,) * 5, plan.parameters, fields, plan.shape[1])


def _plan(
    query: Tensor, dtype: torch.dtype, formula: Formula, is_causal: bool | str, scale: float | None
) -> Plan | None:
    shape = query.shape
    key = (id(formula), shape, dtype, is_causal, scale)
    plan = _plans.get(key)
    if plan is not None and plan.formula is formula:
        return plan if query.is_cpu else None
    usual = len(shape) == 4 and 0 not in shape and query.is_cpu and dtype in binding.TYPES
    if not usual or is_causal not in _ALIGNMENTS or not (scale is None or math.isfinite(scale)):
        return None
    if formula_failure(formula.key, dtype == torch.float64) is not None:
        return None
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    plan = _plans[key] = Plan(formula, query, scale)
    return plan
