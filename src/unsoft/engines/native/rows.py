"""Row-coupled attention by compiled code: the core of kernel/rows and one rule."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import lru_cache

import torch

from unsoft.engines.call import Call, Gradients, Rows, Upstream
from unsoft.engines.dense import visible_entries
from unsoft.engines.native.binding import (
    FINITE,
    Common,
    check_status,
    finished_gradients,
    requested_gradients,
)
from unsoft.engines.native.compiler import KERNEL, load_libraries
from unsoft.engines.rows.rule import RowRule, dense_rows


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
    """Return the compiled rule of a :attr:`RowRule.key`; compile it if need be."""
    return RowKernel(RowRule.from_key(rule), "double" if double else "float")


def forward(call: Call) -> Rows:
    """Return the output, and the peak and threshold of every row."""
    q, v = call.q, call.v
    out = q.new_empty(*q.shape[:3], v.shape[3])
    peak = q.new_zeros(q.shape[:3], dtype=call.compute_dtype)
    threshold = torch.zeros_like(peak)
    if out.numel() == 0 or call.k.shape[2] == 0:
        return Rows(out.zero_(), peak, threshold)
    if (finite := _finite_call(call)) is not None:
        code = row_kernel(call.rule.key, q.dtype == torch.float64)
        common = Common(code, finite)  # held until the kernel has returned
        if check_status(code.forward(common.pack(out, peak, threshold))) == FINITE:
            return Rows(out, peak, threshold)
    return Rows(dense_rows(call)[0], peak, threshold)


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Return the gradients of q, k, v, and of bias and parameters if needed."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (call.q, call.k, call.v))
    requested = requested_gradients(call, upstream)
    if upstream.grad_out.numel() and call.k.shape[2]:
        if (finite := _finite_call(call)) is None:
            return _exact_gradients(call, upstream)
        code = row_kernel(call.rule.key, call.q.dtype == torch.float64)
        common = Common(code, finite)
        packed = common.pack(*upstream.rows, (upstream.grad_out, dq, dk, dv), requested)
        if check_status(code.backward(packed)) != FINITE:
            return _exact_gradients(call, upstream)
    return finished_gradients(call, dq, dk, dv, requested)


def _exact_gradients(call: Call, upstream: Upstream) -> Gradients:
    """Return the gradients of the dense engine, which has the rules for NaN and Inf."""
    needed = {"q": True, "k": True, "v": True, "bias": upstream.need_bias, "params": upstream.need_params}
    names = [name for name, is_needed in needed.items() if is_needed]
    leaves = {name: getattr(call, name).detach().requires_grad_() for name in names}
    with torch.enable_grad():
        out = dense_rows(replace(call, **leaves))[0]
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
