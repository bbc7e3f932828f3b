"""Run the kernels on a call, forward and backward. No step waits for the GPU, so that a call can be captured
in a CUDA graph.

The fast kernels ignore NaN and Inf. Each is followed by an exact kernel, compiled from the same text, that
follows the rules for them: it returns at once if the sum of all inputs is finite, and computes everything
again otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines import tiled
from unsoft.engines.call import Call, Gradients, Rows, Upstream, finite_part
from unsoft.engines.registry import warn_unavailable
from unsoft.engines.terms import Terms, attention_terms, inverse_norm, row_value
from unsoft.engines.triton import launch
from unsoft.engines.triton.call_arguments import CallArguments, fields_view, has_few_queries, view
from unsoft.engines.triton.codegen import row_factor, slots
from unsoft.engines.triton.launch import CannotCompileError, on_device
from unsoft.engines.triton.structures import KernelResults, KeyGradients, QueryGradients, RowGradients, View
from unsoft.engines.triton.tile_sizes import SMALLEST
from unsoft.formula import Expr, derivative


def forward(call: Call) -> Rows:
    """Return output, row peaks and row totals."""
    out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
    peak = call.q.new_empty(call.q.shape[:3], dtype=call.compute_dtype)
    total = torch.empty_like(peak)
    if out.numel() == 0 or call.k.shape[2] == 0:
        return Rows(out.zero_(), peak.zero_(), total.fill_(1))
    results, no_grad = KernelResults(view(out), peak, total), {"grad": view(None), "deltas": None}
    try:
        with on_device(call.q):
            common = CallArguments(call)
            if has_few_queries(call):
                launches = common.few_queries(results)
            else:
                launches = [
                    common.by_rows("forward", exact, results=results, **no_grad) for exact in (False, True)
                ]
            for started in launches:
                launch.start(started)
    except CannotCompileError as error:
        warn_unavailable("triton", str(error))
        return tiled.forward(call)
    return Rows(out, peak, total)


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Return the gradients of q, k and v, and of the other inputs that need one."""
    params, nothing = call.params, call.params.new_empty(0)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v))
    dbias = dquery_fields = dkey_fields = None
    if upstream.need_bias and call.bias is not None:
        dbias = params.new_zeros(*call.q.shape[:3], call.k.shape[2])
    if upstream.need_query_fields and call.query_fields is not None:
        dquery_fields = torch.zeros_like(call.query_fields)
    if upstream.need_key_fields and (key_fields := call.spread_key_fields()) is not None:
        dkey_fields = torch.zeros_like(key_fields)
    dparams = torch.zeros_like(params) if upstream.need_params else nothing
    if upstream.grad_out.numel() == 0 or call.k.shape[2] == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        count, blocks = slots(len(params)), -(-call.q.shape[2] // SMALLEST.rows)
        need_params = upstream.need_params and len(params) > 0
        partial = params.new_zeros(*call.q.shape[:2], blocks, count) if need_params else None
        partials = View(partial, (blocks * count,))
        of_queries = QueryGradients(view(dq), partials, view(dbias), fields_view(dquery_fields))
        of_keys = KeyGradients(view(dk), view(dv), fields_view(dkey_fields))
        try:
            with on_device(call.q):
                row_params, row_fields = _start_backward(call, upstream, of_queries, of_keys)
        except CannotCompileError as error:
            warn_unavailable("triton", str(error))
            return tiled.backward(call, upstream)
        if dquery_fields is not None:
            dquery_fields += row_fields
        if partial is not None:
            dparams = row_params + partial.sum((0, 2))[:, : len(params)].T
    if dkey_fields is not None:
        dkey_fields = tiled.shared_heads(dkey_fields, call)
    summed = nothing if dbias is None or call.bias is None else dbias.sum_to_size(call.bias.shape)
    fields = (
        nothing if d is None or x is None else torch.where(x.isfinite(), d, 0.0)
        for d, x in ((dquery_fields, call.query_fields), (dkey_fields, call.key_fields))
    )
    return Gradients(dq, dk, dv, summed, dparams, *fields)


def _start_backward(
    call: Call, upstream: Upstream, of_queries: QueryGradients, of_keys: KeyGradients
) -> tuple[Tensor, Tensor]:
    """Start the kernels that fill the gradients; return what :func:`row_gradients` adds to parameters and
    query fields."""
    grad, common = upstream.grad_out.resolve_neg(), CallArguments(call)
    delta = (grad.to(call.compute_dtype) * upstream.rows.out.to(call.compute_dtype)).sum(-1)
    no_results = KernelResults(view(None), None, None)
    launch.start(common.by_rows("forward", True, results=no_results, grad=view(grad), deltas=delta))
    terms, factor = row_factor(attention_terms(call.formula, call.bias is not None))
    gradients, row_params, row_fields = row_gradients(terms, factor, call, upstream, delta)
    shared = {"grad": view(grad), "gradients": gradients}
    for exact in (False, True):
        launch.start(common.by_rows("query_gradients", exact, **shared, outputs=of_queries))
        launch.start(common.by_keys("key_gradients", exact, **shared, outputs=of_keys))
    return row_params, row_fields


def row_gradients(
    terms: Terms, factor: Expr, call: Call, upstream: Upstream, delta: Tensor
) -> tuple[RowGradients, Tensor, Tensor]:
    """Return the numbers of every row that the backward kernels need, and the gradients of parameters (P, H)
    and query fields (F, B, H, L) through norm and offset. By torch operations: rows are few compared to
    entries.

    ``terms`` are without the ``factor`` of the row; ``delta`` is the product of each row's output with its
    gradient."""
    rows = upstream.rows
    live, m = rows.live_peak()
    peaks = view(None if terms.peak is None else m)
    symbols = _row_symbols(terms, call, rows, m)
    dparams = torch.zeros_like(call.params)
    dfields = delta.new_zeros(len(terms.fields.query), *delta.shape)
    if terms.mass is None:
        scaled = None if factor.constant == 1 else torch.where(live, row_value(factor, symbols), 0.0)
        return RowGradients(peaks, view(scaled), view(None)), dparams, dfields
    inverse = inverse_norm(terms, symbols, rows.total, live)
    d_norm = -delta * inverse
    slope = 1.0 if terms.norm is None else row_value(derivative(terms.norm, "z"), symbols)
    d_total = torch.where(inverse == 0, 0.0, d_norm * slope)

    def by_row(name: str) -> Tensor:
        part = torch.zeros_like(d_total)
        if terms.norm is not None:
            part = d_norm * row_value(derivative(terms.norm, name), symbols)
        if terms.offset is not None:
            part = part + d_total * row_value(derivative(terms.offset, name), symbols)
        return torch.where(inverse == 0, 0.0, part)

    for row, name in enumerate(terms.names if upstream.need_params else ()):
        dparams[row] = by_row(name).sum((0, 2))
    for row, name in enumerate(terms.fields.query if upstream.need_query_fields else ()):
        dfields[row] = by_row(name)
    return RowGradients(peaks, view(inverse), view(d_total)), dparams, dfields


def _row_symbols(terms: Terms, call: Call, rows: Rows, m: Tensor) -> dict[str, Tensor]:
    """Return m, z, n, i, the parameters and query fields, each broadcastable to (B, H, L)."""
    length = call.q.shape[2]
    if call.positions is None:
        i = torch.arange(length, device=m.device, dtype=m.dtype) + (call.causal_offset or 0)
    else:
        i = call.positions[:, None, :length]
    symbols = {"m": m, "z": rows.total, "i": i}
    symbols |= {name: values[:, None] for name, values in zip(terms.names, call.params, strict=True)}
    if call.query_fields is not None:
        symbols |= dict(zip(terms.fields.query, finite_part(call.query_fields), strict=True))
    return symbols if call.counts is None else symbols | {"n": call.counts}
