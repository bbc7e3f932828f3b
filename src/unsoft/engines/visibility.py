"""Visibility: the causal rule, spans and the mask of a call, for the whole call or for one tile of it.

A key j is visible to the query row i if the causal rule allows it (j <= i + offset), the span of the row
contains it and the mask allows it. A span is an interval of keys: causality, windows, packed documents and
padding at the end are all intervals, and so is their intersection, so two numbers per row describe them.
With ``L`` queries and ``S`` keys the two usual alignments of the causal rule are

    upper_left, offset 0            lower_right, offset S - L
        keys 0 1 2 3 4                  keys 0 1 2 3 4
    row 0    x . . . .              row 0    x x x . .
    row 1    x x . . .              row 1    x x x x .
    row 2    x x x . .              row 2    x x x x x
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from unsoft.engines.call import Call


def split_float_mask(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split an additive mask into (visible, bias). -inf and the lowest finite number of its dtype mask.

    Masked entries get the bias 0, so that nothing infinite ever reaches the arithmetic.

    >>> split_float_mask(torch.tensor([0.5, float("-inf"), torch.finfo(torch.float32).min]), torch.float32)
    (tensor([ True, False, False]), tensor([0.5000, 0.0000, 0.0000]))
    """
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden, torch.where(hidden, 0.0, mask).to(dtype)


def spans_of(
    length: int,
    keys: int,
    offset: int | None,
    *,
    lower_right: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    documents: tuple[Tensor, Tensor] | None = None,
    key_lengths: Tensor | None = None,
    before: bool = False,
    device: torch.device,
) -> Tensor:
    """Return int32 (B|1, L, 2): the first key that each row may see, and one past the last.

    ``offset`` is that of the causal rule, None without it. ``window`` counts positions to the left and right
    of the row's own key; rows and keys are aligned as the causal rule aligns them, at the lower right without
    it. ``documents`` are nondecreasing numbers of queries and keys, (B|1, L) and (B|1, S); within each,
    ``lower_right`` decides the alignment. ``key_lengths`` (B,) hides padding at the end. With ``before``
    the causal rule hides the row's own key too. A row that may see nothing gets an empty span.

    >>> spans_of(4, 4, 0, window=(1, None), device=torch.device("cpu")).tolist()
    [[[0, 1], [0, 2], [1, 3], [2, 4]]]
    """
    rows = torch.arange(length, device=device)
    if documents is None:
        own_key = (rows + (keys - length if offset is None else offset))[None]
        first, last = torch.zeros_like(own_key), torch.full_like(own_key, keys)
    else:
        batch = max(len(x) for x in documents)
        of_queries, of_keys = (x.expand(batch, -1).contiguous() for x in documents)
        first, last = (torch.searchsorted(of_keys, of_queries, right=right) for right in (False, True))
        begin, end = (torch.searchsorted(of_queries, of_queries, right=right) for right in (False, True))
        shift = (last - first) - (end - begin) if lower_right else 0
        own_key = first + rows - begin + shift
    left, right = window
    if left is not None:
        first = torch.maximum(first, own_key - left)
    if right is not None:
        last = torch.minimum(last, own_key + right + 1)
    if offset is not None:
        last = torch.minimum(last, own_key if before else own_key + 1)
    if key_lengths is not None:
        last = torch.minimum(last, key_lengths[:, None])
    first, last = torch.broadcast_tensors(first.clamp(0, keys), last.clamp(0, keys))
    return torch.stack([first, torch.maximum(first, last)], dim=-1).int()


def key_spans(spans: Tensor, keys: int) -> Tensor:
    """Return int32 (B|1, S, 2): the first row that may see each key, and one past the last.

    Both ends of the spans of rows must not decrease, except in rows that see nothing, as is so for spans from
    :func:`spans_of`. Then the rows that may see a key are an interval.

    >>> key_spans(spans_of(4, 4, 0, window=(1, None), device=torch.device("cpu")), 4).tolist()
    [[[0, 2], [1, 3], [2, 4], [3, 4]]]
    """
    first, last = spans.unbind(-1)
    # An empty span may lie anywhere. It moves to the end of the largest before, which keeps the order.
    last = torch.where(first < last, last, 0).cummax(-1).values
    first = torch.where(spans[..., 0] < spans[..., 1], first, last)
    j = torch.arange(keys, dtype=torch.int32, device=spans.device).expand(len(spans), -1).contiguous()
    begin, end = (torch.searchsorted(x.contiguous(), j, right=True, out_int32=True) for x in (last, first))
    return torch.stack([begin, torch.maximum(begin, end)], dim=-1)


def visible_tile(call: Call, mask: Tensor | None, batch: slice, rows: slice, keys: slice) -> Tensor | None:
    """Return the visible entries of one tile, broadcastable to (B, H, rows, keys); None = all are visible.

    ``mask`` is the part of the call's mask that belongs to the heads of the tile.
    """
    tile, device = None if mask is None else take(mask, rows, keys), call.q.device
    j = torch.arange(keys.start, keys.stop, device=device)
    if call.spans is not None:
        spans = (call.spans if len(call.spans) == 1 else call.spans[batch])[:, None, rows]
        allowed = (j >= spans[..., :1]) & (j < spans[..., 1:])
    # The last row sees the most, the first row the least: only tiles that the diagonal cuts need the causal
    # rule.
    elif call.causal_offset is None or keys.stop - 1 <= rows.start + call.causal_offset:
        return tile
    else:
        i = torch.arange(rows.start, rows.stop, device=device)
        allowed = j <= i[:, None] + call.causal_offset
    return allowed if tile is None else tile & allowed


def take(broadcast: Tensor, rows: slice, keys: slice) -> Tensor:
    """Return the tile (rows, keys) of a tensor whose last two dimensions may be 1: the same everywhere."""
    rows = rows if broadcast.shape[-2] != 1 else slice(0, 1)
    keys = keys if broadcast.shape[-1] != 1 else slice(0, 1)
    return broadcast[..., rows, keys]


def count_visible(
    visible: Tensor | None,
    offset: int | None,
    length: int,
    keys: int,
    device: torch.device,
    dtype: torch.dtype,
    spans: Tensor | None = None,
) -> Tensor:
    """Return how many keys each row sees (B|1, H|1, L); at least 1, so that formulas may divide by it.

    A row that sees nothing outputs zero whatever its count, so 1 changes no result.

    >>> count_visible(None, 0, 3, 2, torch.device("cpu"), torch.float32)
    tensor([[[1., 2., 2.]]])
    """
    if spans is not None:
        return _count_in_spans(visible, spans[:, None].long()).clamp(min=1).to(dtype)
    if visible is None and offset is None:
        return torch.full((1, 1, length), max(keys, 1), dtype=dtype, device=device)
    if visible is None and offset is not None:
        last = torch.arange(offset + 1, offset + 1 + length, dtype=dtype, device=device)
        return last.clamp_(1, max(keys, 1)).view(1, 1, length)
    assert visible is not None
    if offset is None:
        # A mask with one column is the same for every key.
        counts = visible.sum(-1) * (keys if visible.shape[-1] == 1 else 1)
        return counts.expand(*visible.shape[:2], length).clamp(min=1).to(dtype)
    last = torch.arange(offset + 1, offset + 1 + length, device=device).clamp_(0, keys)
    if visible.shape[-1] == 1:
        counts = visible[..., 0] * last
    elif visible.shape[-2] == 1:
        counts = torch.nn.functional.pad(visible[:, :, 0].cumsum(-1), (1, 0))[..., last]
    else:
        counts = visible.tril(offset).sum(-1)
    return counts.clamp(min=1).to(dtype)


def _count_in_spans(visible: Tensor | None, spans: Tensor) -> Tensor:
    """Return how many keys of its span (B|1, 1, L, 2) each row sees (B|1, H|1, L)."""
    if visible is None or visible.shape[-1] == 1:
        # A mask with one column is the same for every key.
        return (spans[..., 1] - spans[..., 0]) * (1 if visible is None else visible[..., 0])
    before = torch.nn.functional.pad(visible.cumsum(-1), (1, 0))  # visible keys before each key
    batch = max(len(before), len(spans))
    before = before.expand(batch, -1, spans.shape[2], -1)
    ends = spans.expand(batch, before.shape[1], -1, -1)
    return before.gather(-1, ends).diff(dim=-1)[..., 0]
