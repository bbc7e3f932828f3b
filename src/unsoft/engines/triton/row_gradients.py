"""What the backward kernels need of every row, by torch operations:
rows are few beside the entries of the tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.engines.call import Call, Rows, Upstream, finite_part
from unsoft.engines.terms import Terms, inverse_norm, row_value
from unsoft.formula import Expr, derivative


class FoundRows(NamedTuple):
    """Per row (B, H, L); None where the kernel needs no such number."""

    peaks: Tensor | None
    inverses: Tensor | None
    """factor / norm"""
    totals: Tensor | None
    """The gradient of the summed mass."""
    params: Tensor
    """What norm and offset owe the parameters (P, H)."""
    query_fields: Tensor
    """And the fields of queries (F, B, H, L)."""


def row_gradients(terms: Terms, factor: Expr, call: Call, upstream: Upstream, delta: Tensor) -> FoundRows:
    """``terms`` are without the ``factor`` of the row; ``delta`` is the product of each row's output with its
    gradient."""
    rows = upstream.rows
    live, m = rows.live_peak()
    peaks = None if terms.peak is None else m
    symbols = _row_symbols(terms, call, rows, m)
    dparams = torch.zeros_like(call.params)
    dfields = delta.new_zeros(len(terms.fields.query), *delta.shape)
    if terms.mass is None:
        scaled = None if factor.constant == 1 else torch.where(live, row_value(factor, symbols), 0.0)
        return FoundRows(peaks, scaled, None, dparams, dfields)
    inverse = inverse_norm(terms, symbols, rows.total, live)
    d_norm = -delta * inverse
    slope = 1.0 if terms.norm is None else row_value(derivative(terms.norm, "z"), symbols)
    d_total = torch.where(inverse == 0, 0.0, d_norm * slope)

    def owed(name: str) -> Tensor:
        part = torch.zeros_like(d_total)
        if terms.norm is not None:
            part = d_norm * row_value(derivative(terms.norm, name), symbols)
        if terms.offset is not None:
            part = part + d_total * row_value(derivative(terms.offset, name), symbols)
        return torch.where(inverse == 0, 0.0, part)

    for row, name in enumerate(terms.names if upstream.need_params else ()):
        dparams[row] = owed(name).sum((0, 2))
    for row, name in enumerate(terms.fields.query if upstream.need_query_fields else ()):
        dfields[row] = owed(name)
    return FoundRows(peaks, inverse, d_total, dparams, dfields)


def _row_symbols(terms: Terms, call: Call, rows: Rows, m: Tensor) -> dict[str, Tensor]:
    """m, z, n, i, the parameters and fields of queries, each broadcastable to (B, H, L)."""
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
