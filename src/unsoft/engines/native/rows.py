"""Row-coupled attention by compiled code: the core of kernel/rows and one rule."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import lru_cache
from typing import cast

import torch

from unsoft.engines.call import Call, Gradients, Rows, Upstream
from unsoft.engines.dense import visible_entries
from unsoft.engines.native.binding import FINITE, Common, check_status
from unsoft.engines.native.compiler import KERNEL, load_libraries
from unsoft.engines.rows.dense import dense_rows
from unsoft.engines.rows.rule import RowRule


class RowKernel:
    """One rule, compiled for one arithmetic type."""

    def __init__(self, rule: RowRule, real: str) -> None:
        sources = {"rows": (KERNEL / "rows" / "core.cpp").read_text(), "rule": rule.source()}
        self._core, self._rule = load_libraries(sources, real)
        self._rule.unsoft_mechanism.restype = ctypes.c_void_p
        self.mechanism = self._rule.unsoft_mechanism()
        self.forward, self.backward = self._core.unsoft_forward, self._core.unsoft_backward


@lru_cache(maxsize=256)
def row_kernel(rule: str, double: bool) -> RowKernel:
    """The compiled rule of a :attr:`RowRule.key`; compiles it if need be."""
    return RowKernel(RowRule.from_key(rule), "double" if double else "float")


def rule_of(call: Call) -> RowRule:
    """What stands in the place of a formula."""
    return cast(RowRule, call.formula)


def forward(call: Call) -> Rows:
    """Output, and the peak and threshold of every row."""
    q, v = call.q, call.v
    out = q.new_empty(*q.shape[:3], v.shape[3])
    peak = q.new_zeros(q.shape[:3], dtype=call.compute_dtype)
    threshold = torch.zeros_like(peak)
    if out.numel() == 0 or call.k.shape[2] == 0:
        return Rows(out.zero_(), peak, threshold)
    if (finite := _finite_call(call)) is not None:
        code = row_kernel(rule_of(call).key, q.dtype == torch.float64)
        common = Common(code, finite)  # held until the kernel has returned
        if check_status(code.forward(common.fields(out, peak, threshold))) == FINITE:
            return Rows(out, peak, threshold)
    return Rows(dense_rows(call, rule_of(call))[0], peak, threshold)


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Gradients of q, k, v, bias and params; the last two are empty unless needed."""
    q, k, v, params = call.q, call.k, call.v, call.params
    grad_out, rows, need_bias, need_params, *_ = upstream
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
    dbias = params.new_zeros(*q.shape[:3], k.shape[2]) if need_bias else None
    dparams = torch.zeros(q.shape[1], params.shape[0], dtype=torch.float64) if need_params else None
    if grad_out.numel() and k.shape[2]:
        status = FINITE + 1
        if (finite := _finite_call(call)) is not None:
            code = row_kernel(rule_of(call).key, q.dtype == torch.float64)
            common = Common(code, finite)
            wanted = common.fields(*rows, (grad_out, dq, dk, dv), (dbias, dparams, None, None))
            status = check_status(code.backward(wanted))
        if status != FINITE:
            return _exact_gradients(call, upstream)
    return Gradients(
        dq,
        dk,
        dv,
        params.new_empty(0) if dbias is None or call.bias is None else dbias.sum_to_size(call.bias.shape),
        params.new_empty(0) if dparams is None else dparams.T.to(params.dtype),
        query_fields=params.new_empty(0),
        key_fields=params.new_empty(0),
    )


def _exact_gradients(call: Call, upstream: Upstream) -> Gradients:
    """By the dense engine, which has the rules for NaN and Inf."""
    needed = {"q": True, "k": True, "v": True, "bias": upstream.need_bias, "params": upstream.need_params}
    names = [name for name, wanted in needed.items() if wanted]
    leaves = {name: getattr(call, name).detach().requires_grad_() for name in names}
    with torch.enable_grad():
        out = dense_rows(replace(call, **leaves), rule_of(call))[0]
    found = torch.autograd.grad(out, list(leaves.values()), upstream.grad_out, materialize_grads=True)
    unasked = {name: call.params.new_empty(0) for name in Gradients._fields}  # outputs must not share memory
    return Gradients(**(unasked | dict(zip(names, found, strict=True))))


def _finite_call(call: Call) -> Call | None:
    """The call, with 0 in place of keys and values that no row sees if any input holds NaN or Inf, as the
    unused end of a cache may; None if what can be seen holds some."""
    if _is_finite(call):
        return call
    seen = visible_entries(call).any(2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (call.k.shape[1], -1)).any(2)
    k, v = (torch.where(seen[..., None], x, 0.0) for x in (call.k, call.v))
    call = replace(call, k=k, v=v)
    return call if _is_finite(call) else None


def _is_finite(call: Call) -> bool:
    """Is every input finite? A sum that overflows may say no: then the work is done again, slowly."""
    given = (call.q, call.k, call.v, call.bias)
    return all(x is None or bool(x.detach().sum(dtype=call.compute_dtype).isfinite()) for x in given)
