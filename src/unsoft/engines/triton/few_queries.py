"""Few queries on many keys, which is decoding: the keys are split among programs,
so that the whole GPU reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.call import Call
from unsoft.engines.triton.call_arguments import CallArguments, padded, view
from unsoft.engines.triton.launch import Launch, interpreted
from unsoft.engines.triton.tile_sizes import TileSizes

MOST_ROWS = 64
"""Queries times query heads of one key head that still count as few."""
FEW = 16
_SMALLEST_SPLIT = 256
_MOST_SPLITS = 64
_INTERPRETED = (3, 16)
"""Splits and keys of a tile in Triton's interpreter: small, so that small tests have several."""


def has_few_queries(call: Call) -> bool:
    """Could a call be split over its keys?

    >>> from unsoft.engines.arguments import checked_call
    >>> from unsoft.formula import Formula
    >>> q, k = torch.zeros(1, 8, 1, 64), torch.zeros(1, 2, 1000, 64)
    >>> has_few_queries(checked_call(q, k, k, Formula("s/n"), enable_gqa=True)[0])
    True
    """
    length, group = call.q.shape[2], call.q.shape[1] // call.k.shape[1]
    return length <= FEW and length * group <= MOST_ROWS


def few_queries(common: CallArguments, out: Tensor, peak: Tensor, total: Tensor) -> list[Launch]:
    """The two kernels: sums over parts of the keys, and one row from its parts."""
    batch, kv_heads, keys, _ = common.k.shape
    heads, length = out.shape[1:3]
    rows = padded(heads // kv_heads * length)
    splits, tile = _INTERPRETED if interpreted() else (_splits(batch * kv_heads, keys), 64)
    chunk = -(-keys // (splits * tile)) * tile
    shape = (batch, kv_heads, splits, rows)
    sums, tops, masses = (peak.new_empty(*shape, columns) for columns in (common.fixed.value_padded, 1, 1))
    parts = {"sums": sums, "tops": tops, "masses": masses}
    fixed = common.fixed._replace(exact=True)
    first = common.arguments | parts | {"chunk": chunk, "FIXED": fixed}
    second = {name: common.arguments[name] for name in ("extras", "numbers", "shape")} | parts
    second |= {"out": view(out), "peaks": peak, "totals": total, "FIXED": fixed}
    second |= {"ROWS": rows, "splits": splits}
    key, dtype, code = common.call.formula.key, common.q.dtype, common.code
    across = 1 << (splits - 1).bit_length()
    return [
        Launch(
            "decode",
            code.decode,
            first,
            lambda sizes: (splits, batch * kv_heads),
            key,
            dtype,
            tuple(TileSizes(rows, keys, 4, stages) for keys, stages in _tiles(tile)),
        ),
        Launch(
            "combine",
            code.combine,
            second,
            lambda sizes: (length, batch * heads),
            key,
            dtype,
            (TileSizes(16, across, 4, 1),),
        ),
    ]


def _tiles(keys: int) -> list[tuple[int, int]]:
    """Keys of a tile and stages of the pipeline, to try until one has room; all divide the first."""
    return [(keys, 2), *((smaller, 1) for smaller in (keys, keys // 2, keys // 4) if smaller >= 16)]


def _splits(programs: int, keys: int) -> int:
    """So many that all multiprocessors have two programs, and none has too little to do."""
    wanted = -(-2 * torch.cuda.get_device_properties().multi_processor_count // programs)
    return max(1, min(wanted, -(-keys // _SMALLEST_SPLIT), _MOST_SPLITS))
