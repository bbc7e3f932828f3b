"""Runs the kernels on a call. No step waits for the GPU, so that a call can be captured in a CUDA graph.

Kernels have no rules for NaN and Inf. So each is followed by one of a second kind, compiled from the same
text, that has them: it ends at once unless the sum of all inputs is not finite, and otherwise computes
everything again.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from unsoft.engines import tiled
from unsoft.engines.call import Call, Gradients, Rows, Upstream
from unsoft.engines.registry import warn_unavailable
from unsoft.engines.terms import attention_terms
from unsoft.engines.triton.call_arguments import CallArguments, fields_view, view
from unsoft.engines.triton.codegen import row_factor, slots
from unsoft.engines.triton.few_queries import few_queries, has_few_queries
from unsoft.engines.triton.kernel.structures import RowGradients, View
from unsoft.engines.triton.launch import CannotCompileError, start
from unsoft.engines.triton.row_gradients import row_gradients
from unsoft.engines.triton.tile_sizes import SMALLEST


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
            common = CallArguments(call)
            if has_few_queries(call):
                launches = few_queries(common, out, peak, total)
            else:
                launches = [common.by_rows("forward", exact, **results) for exact in (False, True)]
            for launch in launches:
                start(launch)
    except CannotCompileError as error:
        warn_unavailable("triton", str(error))
        return tiled.forward(call)
    return Rows(out, peak, total)


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Gradients of q, k and v, and of what else is needed."""
    params, need_bias = call.params, upstream.need_bias and call.bias is not None
    need_params = upstream.need_params and params.shape[0] > 0
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v))
    dbias = params.new_zeros(*call.q.shape[:3], call.k.shape[2]) if need_bias else None
    dparams = torch.zeros_like(params) if upstream.need_params else params.new_empty(0)
    dfields = [
        torch.zeros_like(x) if needed and x is not None else None
        for needed, x in (
            (upstream.need_query_fields, call.query_fields),
            (upstream.need_key_fields, call.spread_key_fields()),
        )
    ]
    if upstream.grad_out.numel() == 0 or call.k.shape[2] == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        try:
            with on_device(call.q):
                dparams = _run_backward(call, upstream, (dq, dk, dv), dbias, dfields, dparams, need_params)
        except CannotCompileError as error:
            warn_unavailable("triton", str(error))
            return tiled.backward(call, upstream)
    summed = params.new_empty(0) if dbias is None or call.bias is None else dbias.sum_to_size(call.bias.shape)
    if dfields[1] is not None:
        dfields[1] = tiled.shared_heads(dfields[1], call)
    of_queries, of_keys = (
        params.new_empty(0) if d is None or x is None else torch.where(x.isfinite(), d, 0.0)
        for d, x in zip(dfields, (call.query_fields, call.key_fields), strict=True)
    )
    return Gradients(dq, dk, dv, summed, dparams, of_queries, of_keys)


def _run_backward(
    call: Call,
    upstream: Upstream,
    results: tuple[Tensor, Tensor, Tensor],
    dbias: Tensor | None,
    dfields: list[Tensor | None],
    dparams: Tensor,
    need_params: bool,
) -> Tensor:
    """Fills the gradients; returns that of the parameters."""
    grad, rows, params = upstream.grad_out.resolve_neg(), upstream.rows, call.params
    batch, heads, length, _ = call.q.shape
    common = CallArguments(call)
    delta = (grad.to(call.compute_dtype) * rows.out.to(call.compute_dtype)).sum(-1)
    nothing = {"out": view(None), "peaks": None, "totals": None}
    start(common.by_rows("forward", True, **nothing, grad=view(grad), deltas=delta))
    terms, factor = row_factor(attention_terms(call.formula, call.bias is not None))
    found = row_gradients(terms, factor, call, upstream, delta)
    gradients = RowGradients(view(found.peaks), view(found.inverses), view(found.totals))
    count, blocks = slots(params.shape[0]), -(-length // SMALLEST.rows)
    partial = params.new_zeros(batch, heads, blocks, count) if need_params else None
    partials = View(partial, (blocks * count,))
    dq, dk, dv = (view(x) for x in results)
    shared = {"grad": view(grad), "gradients": gradients}
    of_queries, of_keys = (fields_view(x) for x in dfields)
    more = {"dparams": partials, "dbias": view(dbias), "PARAMETERS_TOO": need_params, "dfields": of_queries}
    for exact in (False, True):
        start(common.by_rows("query_gradients", exact, **shared, **more, dq=dq))
        start(common.by_keys("key_gradients", exact, **shared, dk=dk, dv=dv, dfields=of_keys))
    if dfields[0] is not None:
        dfields[0] += found.query_fields
    if partial is None:
        return dparams
    return found.params + partial.sum((0, 2))[:, : params.shape[0]].T


def on_device(x: Tensor) -> Any:
    """Triton starts kernels on the current GPU, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
