"""A decoding step of a pair of attention maps by compiled code: the second query before the maps,
their difference after them."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from unsoft.engines.native.availability import library, library_failure

_CALL = struct.Struct("13q")


def pairs_ready(query: Tensor, negative_map: Tensor) -> bool:
    """Return True if compiled code can take this query (B, H, T, D) and map (H, D, D)."""
    dtype = query.dtype
    usual = query.dim() == 4 and query.is_cpu and dtype in (torch.float32, torch.float64)
    fits = usual and negative_map.shape == (query.shape[1], query.shape[3], query.shape[3])
    return fits and negative_map.dtype is dtype and library_failure("pairs", dtype is torch.float64) is None


def pair_queries(query: Tensor, negative_map: Tensor, mapped_first: bool) -> Tensor:
    """Return (B, 2 H, T, D): each query head, and after it relu(q) W, or relu(q W) if ``mapped_first``.

    >>> q, w = torch.tensor([[[[1.0, -2.0]]]]), torch.tensor([[[3.0, 5.0], [7.0, 9.0]]])
    >>> pair_queries(q, w, False).flatten(0, 2)
    tensor([[ 1., -2.],
            [ 3.,  5.]])
    """
    query, negative_map = query.contiguous(), negative_map.contiguous()
    batch, heads, tokens, width = query.shape
    both = query.new_empty(batch, 2 * heads, tokens, width)
    addresses = (query.data_ptr(), negative_map.data_ptr(), both.data_ptr())
    call = _CALL.pack(batch, heads, tokens, width, 0, mapped_first, *addresses, 0, 0, 0, 0)
    library("pairs", query.dtype is torch.float64).unsoft_pair_queries(call)
    return both


def pair_difference(maps: Tensor, plus: Tensor, minus: Tensor) -> Tensor:
    """Return plus A1 - minus A2 for outputs (B, 2 H, T, Dv) of heads in pairs, with two numbers per pair.

    >>> maps = torch.tensor([[[[1.0, 2.0]], [[10.0, 20.0]]]])
    >>> pair_difference(maps, torch.tensor([2.0]), torch.tensor([0.5])).flatten()
    tensor([-3., -6.])
    """
    batch, heads, tokens, values = maps.shape
    out = maps.new_empty(batch, heads // 2, tokens, values)
    addresses = (x.data_ptr() for x in (maps, plus, minus, out))
    call = _CALL.pack(batch, heads // 2, tokens, 0, values, 0, 0, 0, 0, *addresses)
    library("pairs", maps.dtype is torch.float64).unsoft_pair_difference(call)
    return out
