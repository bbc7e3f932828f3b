"""Runs the kernels on a call. No step waits for the GPU, so that a call can be captured in a CUDA graph.

Kernels have no rules for NaN and Inf. So each is followed by one of a second kind, compiled from the same
text, that has them: it ends at once unless the sum of all inputs is not finite, and otherwise computes
everything again.
"""

from __future__ import annotations

import math
import struct
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from unsoft.engines import tiled
from unsoft.engines.call import Call, Gradients, Rows, Upstream
from unsoft.engines.dropout import keep_factor
from unsoft.engines.terms import attention_terms
from unsoft.engines.triton.availability import warn_once
from unsoft.engines.triton.codegen import parameter_slots, row_factor
from unsoft.engines.triton.kernel.structures import Extras, Fixed, Numbers, RowGradients, Shape, View
from unsoft.engines.triton.launch import CannotCompileError, Grid, Launch, start
from unsoft.engines.triton.row_gradients import row_gradients
from unsoft.engines.triton.source import Kernels, kernels

_SMALLEST_BLOCK = 16


class _Common:
    """What all kernels of a call are given."""

    def __init__(self, call: Call) -> None:
        # What lies in the memory of a negative view (x.conj().imag is one) is not what it stands for.
        self.q, self.k, self.v = (x.resolve_neg() for x in (call.q, call.k, call.v))
        self.call = call
        self.code: Kernels = kernels(call.formula.key, call.bias is not None)
        (batch, heads, length, width), (_, kv_heads, keys, value_width) = self.q.shape, self.v.shape
        full = (batch, heads, length, keys)
        self.full = full
        self.flag = _sum_of_all([self.q, self.k, self.v, call.bias], call.compute_dtype)
        rows = keys_at = None
        if call.positions is not None:
            both = call.positions.expand(batch, -1)[:, None].expand(-1, heads, -1)
            rows, keys_at = both[..., :length], both[..., length:]
        seen = None if call.visible is None else call.visible.view(torch.uint8).expand(full)
        self.arguments: dict[str, Any] = {
            "q": view(self.q),
            "k": view(self.k),
            "v": view(self.v),
            "flag": self.flag,
            "extras": Extras(
                view(seen),
                view(None if call.bias is None else call.bias.resolve_neg().expand(full)),
                view(None if call.counts is None else call.counts.expand(full[:3])),
                view(rows),
                view(keys_at),
                call.params.resolve_neg().contiguous(),
                call.seed,
            ),
            "numbers": Numbers(
                *two_floats(call.scale),
                *two_floats(keep_factor(call.dropout_p)),
                round(call.dropout_p * 2**32),
            ),
            "shape": Shape(heads, length, keys, call.causal_offset or 0),
        }
        self.fixed = Fixed(
            group=heads // kv_heads,
            width=width,
            padded=padded(width),
            value_width=value_width,
            value_padded=padded(value_width),
            causal=call.causal_offset is not None,
            precision=_precision(self.q.dtype),
            double=self.q.dtype == torch.float64,
            exact=False,
        )

    def by_rows(self, name: str, exact: bool, **arguments: Any) -> None:
        """Starts a kernel whose programs own blocks of rows."""
        batch, heads, length, _ = self.full
        self._start(name, exact, lambda sizes: (-(-length // sizes.rows), batch * heads), arguments)

    def by_keys(self, name: str, exact: bool, **arguments: Any) -> None:
        """Starts a kernel whose programs own blocks of keys."""
        batch, kv_heads, keys, _ = self.k.shape
        self._start(name, exact, lambda sizes: (-(-keys // sizes.keys), batch * kv_heads), arguments)

    def _start(self, name: str, exact: bool, grid: Grid, arguments: dict[str, Any]) -> None:
        given = {**self.arguments, **arguments, "FIXED": self.fixed._replace(exact=exact)}
        start(Launch(name, getattr(self.code, name), given, grid, self.call.formula.key, self.q.dtype))


def forward(call: Call) -> Rows:
    """Output, row peaks and row totals."""
    out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
    peak = call.q.new_empty(call.q.shape[:3], dtype=call.compute_dtype)
    total = torch.empty_like(peak)
    if out.numel() == 0 or call.k.shape[2] == 0:
        return Rows(out.zero_(), peak.zero_(), total.fill_(1))
    results = {"out": view(out), "peaks": peak, "totals": total, "grad": view(None), "deltas": None}
    try:
        with on_device(call.q):
            common = _Common(call)
            for exact in (False, True):
                common.by_rows("forward", exact, **results)
    except CannotCompileError as error:
        warn_once(str(error))
        return tiled.forward(call)
    return Rows(out, peak, total)


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Gradients of q, k, v, bias and params; the last two are empty unless needed."""
    params, need_bias = call.params, upstream.need_bias and call.bias is not None
    need_params = upstream.need_params and params.shape[0] > 0
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v))
    dbias = params.new_zeros(*call.q.shape[:3], call.k.shape[2]) if need_bias else None
    dparams = torch.zeros_like(params) if upstream.need_params else params.new_empty(0)
    if upstream.grad_out.numel() == 0 or call.k.shape[2] == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        try:
            with on_device(call.q):
                dparams = _run_backward(call, upstream, (dq, dk, dv), dbias, dparams, need_params)
        except CannotCompileError as error:
            warn_once(str(error))
            return tiled.backward(call, upstream)
    summed = params.new_empty(0) if dbias is None or call.bias is None else dbias.sum_to_size(call.bias.shape)
    return Gradients(dq, dk, dv, summed, dparams)


def _run_backward(
    call: Call,
    upstream: Upstream,
    results: tuple[Tensor, Tensor, Tensor],
    dbias: Tensor | None,
    dparams: Tensor,
    need_params: bool,
) -> Tensor:
    """Fills the gradients; returns that of the parameters."""
    grad, rows, params = upstream.grad_out.resolve_neg(), upstream.rows, call.params
    batch, heads, length, _ = call.q.shape
    common = _Common(call)
    delta = (grad.to(call.compute_dtype) * rows.out.to(call.compute_dtype)).sum(-1)
    nothing = {"out": view(None), "peaks": None, "totals": None}
    common.by_rows("forward", True, **nothing, grad=view(grad), deltas=delta)
    terms, factor = row_factor(attention_terms(call.formula, call.bias is not None))
    found = row_gradients(terms, factor, call, rows, delta, need_params)
    gradients = RowGradients(view(found.peaks), view(found.inverses), view(found.totals))
    slots, blocks = parameter_slots(params.shape[0]), -(-length // _SMALLEST_BLOCK)
    partial = params.new_zeros(batch, heads, blocks, slots) if need_params else None
    partials = View(partial, (blocks * slots,))
    dq, dk, dv = (view(x) for x in results)
    shared = {"grad": view(grad), "gradients": gradients}
    more = {"dparams": partials, "dbias": view(dbias), "PARAMETERS_TOO": need_params}
    for exact in (False, True):
        common.by_rows("query_gradients", exact, **shared, **more, dq=dq)
        common.by_keys("key_gradients", exact, **shared, dk=dk, dv=dv)
    if partial is None:
        return dparams
    return found.params + partial.sum((0, 2))[:, : params.shape[0]].T


def view(x: Tensor | None) -> View:
    """A tensor as kernels take it."""
    return View(None, (0, 0, 0, 0)) if x is None else View(x, x.stride())


def padded(width: int) -> int:
    """The next power of two, at least 16, which matrix instructions want."""
    return max(16, 1 << (width - 1).bit_length())


def two_floats(x: float) -> tuple[float, float]:
    """A number as the sum of two that fit float32: what a kernel is given is float32.

    >>> high, low = two_floats(0.1)
    >>> high + low - 0.1
    0.0
    """
    high: float = struct.unpack("f", struct.pack("f", x))[0] if abs(x) < 3e38 else math.copysign(3e38, x)
    return high, x - high


def on_device(x: Tensor) -> Any:
    """Triton starts kernels on the current GPU, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def _sum_of_all(tensors: list[Tensor | None], dtype: torch.dtype) -> Tensor:
    """NaN or Inf if there is any in the tensors (or if the sum overflows, which costs time but changes
    nothing)."""
    return torch.stack([x.sum(dtype=dtype) for x in tensors if x is not None]).sum()


def _precision(dtype: torch.dtype) -> str:
    """How matrices of float32 are multiplied: TF32 only if the user allowed it for all of torch, otherwise
    three TF32 products that together have the precision of float32. AMD has that in hardware."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "tf32x3"
