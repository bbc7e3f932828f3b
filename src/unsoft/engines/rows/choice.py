"""The engines of row-coupled attention, and how one is chosen.

native  compiled code, CPU    logits of a few rows at a time; memory linear in the length
dense   torch operations      the specification; any device, derivatives up to the third; quadratic memory
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.arguments import checked_call, with_leading
from unsoft.engines.call import Call, Gradients, Rows, Upstream
from unsoft.engines.dense import visible_entries
from unsoft.engines.native.availability import failure
from unsoft.engines.native.binding import Kernel, run_backward, run_forward
from unsoft.engines.native.compiler import KERNEL
from unsoft.engines.operator import fused_operator
from unsoft.engines.pointwise import native_unsupported
from unsoft.engines.registry import Engine, Registry, check_return_weights, no_reason
from unsoft.engines.rows.rules import RowRule, dense_rows
from unsoft.tracing import constant_in_graph


@lru_cache(maxsize=256)
def row_kernel(rule: str, dtype: torch.dtype) -> Kernel:
    """Return the compiled rule of a :attr:`RowRule.key`; compile it if need be."""
    generated = RowRule.from_key(rule).source()
    return Kernel({"rows": (KERNEL / "rows" / "core.cpp").read_text(), "rule": generated}, dtype)


def forward(call: Call) -> Rows:
    """Return the output, and the peak and threshold of every row."""
    out, peak, threshold = rows = Rows(*(x.zero_() for x in Rows.empty(call.q, call.v, call.wide)))
    if call.is_empty:
        return rows
    finite = _finite_call(call)
    if finite is not None and run_forward(row_kernel(call.rule.key, call.q.dtype), finite, rows):
        return rows
    return Rows(dense_rows(call)[0], peak, threshold)


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Return the gradients of q, k, v, and of bias and parameters if needed."""
    finite = call if call.is_empty else _finite_call(call)
    if finite is not None:
        gradients, right = run_backward(row_kernel(call.rule.key, call.q.dtype), finite, upstream)
        if right:
            return gradients
    return _exact_gradients(call, upstream)


def _exact_gradients(call: Call, upstream: Upstream) -> Gradients:
    """Return the gradients of the dense engine, which has the rules for NaN and Inf."""
    needed = {"q": True, "k": True, "v": True, "bias": upstream.need_bias, "params": upstream.need_params}
    names = [name for name, is_needed in needed.items() if is_needed]
    leaves = {name: getattr(call, name).detach().requires_grad_() for name in names}
    with torch.enable_grad():
        out = dense_rows(replace(call, wide=False, **leaves))[0]
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream.grad_out, materialize_grads=True)
    empty = {name: call.params.new_empty(0) for name in Gradients._fields}  # outputs must not share memory
    return Gradients(**(empty | dict(zip(names, gradients, strict=True))))


def _finite_call(call: Call) -> Call | None:
    """Return the call, with 0 in place of keys and values that no row sees if any input contains NaN or Inf,
    as the unused end of a cache may. None if visible inputs contain some."""
    if _is_finite(call):
        return call
    seen = visible_entries(call).any(2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (call.k.shape[1], -1)).any(2)
    k, v = (torch.where(seen[..., None], x, 0.0) for x in (call.k, call.v))
    call = replace(call, k=k, v=v)
    return call if _is_finite(call) else None


def _is_finite(call: Call) -> bool:
    """Return True if every input is finite. A sum may overflow for finite inputs: then the slow path runs."""
    tensors = (call.q, call.k, call.v, call.bias)
    return all(x is None or bool(x.detach().sum(dtype=call.compute_dtype).isfinite()) for x in tensors)


@constant_in_graph
def kernel_failure(rule: str, double: bool) -> str | None:
    """Return why the rule cannot be compiled for float32, or float64 if ``double``; None if it can."""
    return failure((rule, double), lambda: row_kernel(rule, torch.float64 if double else torch.float32))


ROWS: Registry[Call, Tensor] = Registry(
    [
        Engine(
            "native",
            lambda call: native_unsupported(call.q),
            fused_operator("rows", forward, backward, RowRule.from_key),
            unavailable_reason=lambda call: kernel_failure(call.rule.key, call.q.dtype == torch.float64),
        ),
        Engine("dense", no_reason, lambda call: dense_rows(call)[0]),
    ],
    missing={
        "triton": "it runs formulas only, and this mechanism needs whole rows; use 'dense'",
        "sdpa": "it computes softmax, and this is another mechanism",
        "tiled": "its weights need whole rows, and it sees one tile at a time; use 'native' or 'dense'",
    },
)
"""All engines for row-coupled attention, the preferred ones first."""


def run_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: RowRule,
    *,
    engine: str = "auto",
    return_weights: bool = False,
    params: Mapping[str, float | Tensor] | None = None,
    before: bool = False,
    wide: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a rule as :func:`unsoft.engines.pointwise.run_formula` runs a formula.

    ``before``: a causal row does not see its own key, only those before it.
    """
    ROWS.check(engine)
    check_return_weights(return_weights, engine)
    call, leading = checked_call(query, key, value, rule, params=params, before=before, **options)
    if before and call.causal_offset is not None:
        call = replace(call, causal_offset=call.causal_offset - 1)
    call = replace(call, wide=wide)
    with torch.autocast(call.q.device.type, enabled=False):
        if not return_weights:
            return with_leading(ROWS.choose(engine, call).run(call), leading)
        out, weights = dense_rows(call)
    return with_leading(out, leading), with_leading(weights, leading)
