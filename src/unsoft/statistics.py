"""Statistics of the weights of a call without the weights: ``unsoft.attention(..., return_stats=True)``.

Each field is defined by a measure of :mod:`unsoft.measure`. The weights exist for a block of rows at a time
only, so memory is linear in the sequence length, for every formula and on every device. The native engine
measures a block in compiled code while it computes the output; for the others, the dense engine computes the
weights of each block once more.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.engines.call import TENSORS, Call
from unsoft.engines.dense import dense_attention, visible_entries
from unsoft.engines.native.binding import forward_with_statistics
from unsoft.engines.operator import INPUTS, OPTIONS, define, is_unobserved
from unsoft.engines.tiled.tiles import BlockSizes, Chunk, Grid
from unsoft.engines.visibility import take
from unsoft.measure.keys import shares_of, top_key_of, top_weight_of
from unsoft.measure.row_measures import negative_share_of, row_sum_of, sparsity_of
from unsoft.measure.rows import WeightRows

_BLOCK_ROWS = 128
_CPU_ELEMENTS, _OTHER_ELEMENTS = 1 << 18, 1 << 25
"""Weights of a block of rows that exist at a time."""


class RowStatistics(NamedTuple):
    """Statistics of attention weights before dropout; each field is a measure of :mod:`unsoft.measure`.

    Rows without mass have the values that the measures document; rows that see nothing have the entropy 0
    and the top key -1. Keys are numbered as in the call, also if it packs documents. Not differentiable.
    """

    entropy: Tensor
    """(..., heads, L): ``measure.entropy``."""
    sparsity: Tensor
    """(..., heads, L): ``measure.sparsity``."""
    row_sum: Tensor
    """(..., heads, L): ``measure.row_sum``."""
    negative_share: Tensor
    """(..., heads, L): ``measure.negative_share``."""
    top_key: Tensor
    """(..., heads, L), int64: ``measure.top_key``."""
    top_weight: Tensor
    """(..., heads, L): ``measure.top_weight``."""
    first_share: Tensor
    """(..., heads, L): ``measure.sink_mass``, the share of key 0."""
    received: Tensor
    """(..., heads, S): ``measure.received``."""


def with_statistics(call: Call, engine: str, run: Callable[[Call], Tensor]) -> tuple[Tensor, RowStatistics]:
    """Return the output and the statistics (B, H, L), and (B, H, S) for ``received``, in the dtype of the
    arithmetic.

    ``engine`` and ``run``: the one that computes the output. The dense engine has the weights, and works
    where operators do not, such as inside of torch.func transforms. The native one computes both at once,
    unless the output is differentiated, traced or dropped from.
    """
    if engine == "dense":
        return run(call), _dense_statistics(call)
    native, unobserved = engine == "native", not torch.compiler.is_compiling() and is_unobserved(call)
    if native and unobserved and call.dropout_p == 0:
        out, stats = _native_statistics(call)
        return run(call) if out is None else out, stats
    tensors, options = call.flat()
    detached = [None if x is None else x.detach() for x in tensors]
    flat = _flat_statistics if unobserved else torch.ops.unsoft.statistics.default
    return run(call), RowStatistics(*flat(*detached, **options, native=native))


def _flat_statistics(*tensors: Tensor | None, native: bool, **options: Any) -> tuple[Tensor, ...]:
    call = replace(Call.from_flat(tensors, **options), dropout_p=0.0, seed=None)
    with torch.no_grad():
        # Values without columns: nothing but the weights is computed.
        return _native_statistics(replace(call, v=call.v[..., :0]))[1] if native else _block_statistics(call)


def _flat_shapes(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    named = dict(zip(TENSORS, tensors, strict=True))
    assert named["q"] is not None and named["k"] is not None
    return _empty(named["q"], named["k"].shape[2])


define(
    "statistics",
    f"({INPUTS}, *, {OPTIONS}, bool native) -> ({', '.join('Tensor' for _ in RowStatistics._fields)})",
    _flat_statistics,
    _flat_shapes,
)


def _native_statistics(call: Call) -> tuple[Tensor | None, RowStatistics]:
    """Return the output and the statistics from the compiled kernel, None for the output if the exact rules
    for NaN and Inf apply, or if there is nothing to compute."""
    if 0 not in (*call.q.shape[:3], call.k.shape[2]):
        stats = _empty(call.q, call.k.shape[2])
        received = torch.zeros_like(stats.received, dtype=torch.float64)
        out = forward_with_statistics(call, stats._replace(received=received))
        if out is not None:
            return out, stats._replace(received=received.to(stats.received.dtype))
    return None, _block_statistics(call)


def _empty(q: Tensor, keys: int) -> RowStatistics:
    row = q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    fields = {name: torch.empty_like(row) for name in RowStatistics._fields}
    fields["top_key"] = torch.empty_like(row, dtype=torch.int64)
    fields["received"] = row.new_zeros(*q.shape[:2], keys)
    return RowStatistics(**fields)


def _block_statistics(call: Call) -> RowStatistics:
    """Return the statistics of any call, by the dense engine on blocks of rows and the keys they may see."""
    stats = _empty(call.q, call.k.shape[2])
    elements = _CPU_ELEMENTS if call.q.device.type == "cpu" else _OTHER_ELEMENTS
    grid = Grid(call, BlockSizes(_BLOCK_ROWS, max(call.k.shape[2], 1), elements))
    for chunk in grid.chunks():
        for rows in grid.row_blocks():
            first, last = grid.reach(chunk, rows)
            part = _dense_statistics(_part(call, chunk, rows, slice(first, max(first, last))), first)
            for name, x in part._asdict().items():
                if name == "received":
                    stats.received[chunk.batch, chunk.heads, first : max(first, last)] += x
                else:
                    getattr(stats, name)[chunk.batch, chunk.heads, rows] = x
    return stats


def _dense_statistics(call: Call, first_key: int = 0) -> RowStatistics:
    """Return the statistics of a call from its whole weights; its keys are numbered from ``first_key``."""
    dtype = call.compute_dtype
    # Without columns in v nothing but the weights is computed, and they are not rounded to half precision.
    wide = replace(call, q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype)[..., :0])
    visible = visible_entries(call).expand(*call.q.shape[:3], -1)
    rows = WeightRows(dense_attention(wide)[1].detach(), visible)
    top = top_key_of(rows)
    return RowStatistics(
        entropy=rows.entropy,
        sparsity=sparsity_of(rows),
        row_sum=row_sum_of(rows),
        negative_share=negative_share_of(rows),
        top_key=torch.where(top < 0, top, top + first_key),
        top_weight=top_weight_of(rows),
        first_share=rows.per_mass(rows.first if first_key == 0 else torch.zeros_like(rows.mass)),
        received=shares_of(rows).sum(-2),
    )


def _part(call: Call, chunk: Chunk, rows: slice, keys: slice) -> Call:
    """Return the call of some heads, rows and keys."""
    length = call.q.shape[2]
    positions = call.positions
    if positions is None and {"i", "j"} & call.rule.uses:
        i, j = (torch.arange(size, dtype=call.compute_dtype) for size in (length, call.k.shape[2]))
        positions = torch.cat([i + (call.causal_offset or 0), j])[None].to(call.q.device)
    if positions is not None:
        own = positions if len(positions) == 1 else positions[chunk.batch]
        positions = torch.cat([own[:, rows], own[:, length:][:, keys]], dim=1)
    spans, offset = call.spans, call.causal_offset
    query_fields, key_fields = call.query_fields, call.spread_key_fields()
    if spans is not None:
        spans = (spans if len(spans) == 1 else spans[chunk.batch])[:, rows] - keys.start
    return replace(
        call,
        q=call.q[chunk.batch, chunk.heads, rows],
        k=call.k[chunk.batch, chunk.kv_heads, keys],
        v=call.v[chunk.batch, chunk.kv_heads, keys],
        params=call.params[:, chunk.heads],
        visible=None if call.visible is None else take(chunk.of(call.visible), rows, keys),
        bias=None if call.bias is None else take(chunk.of(call.bias), rows, keys),
        causal_offset=None if offset is None else offset + rows.start - keys.start,
        spans=spans,
        counts=None if call.counts is None else chunk.of(call.counts)[..., rows],
        positions=positions,
        query_fields=None if query_fields is None else query_fields[:, chunk.batch, chunk.heads, rows],
        key_fields=None if key_fields is None else key_fields[:, chunk.batch, chunk.heads, keys],
    )
