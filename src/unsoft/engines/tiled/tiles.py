"""Tiles of an attention matrix: chunks of heads, blocks of rows and blocks of keys.

One tile is (b, h, rows, keys): all heads of a chunk at once, so that one batched matrix product serves many
heads. Its size is bounded, which is what keeps the memory of the engine linear in the sequence length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import Call, finite_part
from unsoft.engines.dropout import kept_tile
from unsoft.engines.terms import BIAS
from unsoft.engines.tiled.program import Workspace, bit_mask, keep_
from unsoft.engines.visibility import take, visible_tile


@dataclass(frozen=True)
class BlockSizes:
    """Rows and keys of a tile, and its elements over all heads of a chunk."""

    rows: int
    keys: int
    elements: int


# Measured on 2 cores (Zen 4, 1 MB of L2 each): larger tiles leave the caches, smaller ones pay per torch
# call.
CPU_TILES = BlockSizes(rows=128, keys=512, elements=1 << 19)
# A guess for accelerators, where the Python loop should be short and memory bandwidth is high.
OTHER_TILES = BlockSizes(rows=1024, keys=1024, elements=1 << 25)


MAY_BE_NONFINITE = ("q", "k", "v", "bias", "query_fields", "key_fields")
"""The tensors of a call that may hold NaN or Inf."""


@dataclass(frozen=True)
class Chunk:
    """Some heads of some batches: either all heads of several batches or several heads of one."""

    batch: slice
    heads: slice
    kv_heads: slice

    @property
    def batch_size(self) -> int:
        return size_of(self.batch)

    @property
    def head_count(self) -> int:
        return size_of(self.heads)

    @property
    def matrices(self) -> int:
        """Key heads of the chunk: as many matrix products as one tile is."""
        return self.batch_size * size_of(self.kv_heads)

    def of(self, x: Tensor) -> Tensor:
        """Return the part of a (B|1, H|1, ...) tensor that belongs to the query heads of this chunk."""
        batch = self.batch if x.shape[0] != 1 else slice(0, 1)
        heads = self.heads if x.shape[1] != 1 else slice(0, 1)
        return x[batch, heads]


class Grid:
    """The tiles of a call and their layout."""

    def __init__(self, call: Call, sizes: BlockSizes | None = None) -> None:
        self.call, self.dtype = call, call.compute_dtype
        self.space = Workspace(self.dtype, call.q.device)
        if sizes is None:
            sizes = CPU_TILES if call.q.device.type == "cpu" else OTHER_TILES
        self.sizes = sizes
        self.group = call.q.shape[1] // max(call.k.shape[1], 1)
        """Query heads per key head."""
        # Fewer rows where many query heads share a key head: they are stacked in one matrix.
        stacked = max(1, self.group * min(call.k.shape[2], sizes.keys))
        self.rows_per_block = max(1, min(call.q.shape[2], sizes.rows, sizes.elements // stacked))
        self.heads_per_chunk = max(1, sizes.elements // (stacked * self.rows_per_block))

    def chunks(self) -> Iterator[Chunk]:
        """Yield chunks that cover all heads; nothing if there is no output at all."""
        batches, kv_heads = self.call.k.shape[:2]
        if self.call.q.shape[0] * self.call.q.shape[1] * self.call.q.shape[2] == 0:
            return
        together = max(1, self.heads_per_chunk // kv_heads)
        for batch in blocks(batches, together):
            for kv in blocks(kv_heads, min(kv_heads, self.heads_per_chunk)):
                yield Chunk(batch, slice(kv.start * self.group, kv.stop * self.group), kv)

    def row_blocks(self) -> Iterator[slice]:
        yield from blocks(self.call.q.shape[2], self.rows_per_block)

    def key_blocks(self, chunk: Chunk, rows: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """Yield blocks of keys that some of the rows see, with the bit mask of what is seen (None = all)."""
        first, last = self.reach(chunk, rows)
        stacked = (rows.stop - rows.start) * chunk.batch_size * chunk.head_count
        mask = None if self.call.visible is None else chunk.of(self.call.visible)
        for part in blocks(last - first, max(1, self.sizes.elements // stacked)):
            block = slice(first + part.start, first + part.stop)
            seen = visible_tile(self.call, mask, chunk.batch, rows, block)
            some_hidden = mask is not None or self.call.spans is not None
            if seen is None or (some_hidden and seen.all()):
                yield block, None
            elif not some_hidden or seen.any():
                yield block, bit_mask(seen, self.dtype)

    def reach(self, chunk: Chunk, rows: slice) -> tuple[int, int]:
        """Return the first key that some of the rows may see, and one past the last."""
        keys, spans = self.call.k.shape[2], self.call.spans
        if spans is not None:
            own = (spans if len(spans) == 1 else spans[chunk.batch])[:, rows]
            return int(own[..., 0].min()), int(own[..., 1].max())
        if self.call.causal_offset is not None:
            keys = min(keys, max(0, rows.stop + self.call.causal_offset))
        return 0, keys

    @cached_property
    def _symbols(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Symbols of all rows and of all keys."""
        return self.call.row_symbols(), self.call.key_symbols()

    def row_symbols(self, chunk: Chunk, rows: slice) -> dict[str, Tensor]:
        """Return i, n, the parameters and fields of queries, each broadcastable to (b, h, rows, 1)."""
        one = slice(0, 1)
        return {name: take(chunk.of(x)[..., None], rows, one) for name, x in self._symbols[0].items()}

    def tile_symbols(self, chunk: Chunk, rows: slice, keys: slice, logits: Tensor) -> dict[str, Tensor]:
        """Return s, j, fields of keys and the bias, broadcastable to (b, h, rows, keys). A logit bias is
        added to s in place."""
        one = slice(0, 1)
        symbols = {name: take(chunk.of(x)[..., None, :], one, keys) for name, x in self._symbols[1].items()}
        symbols["s"] = logits
        if self.call.bias is not None:
            bias = take(chunk.of(self.call.bias), rows, keys)
            if self.call.formula.bias == "logit":
                logits.add_(bias)
            else:
                symbols[BIAS] = bias
        return symbols

    def stacked(self, x: Tensor, chunk: Chunk, rows: slice, factor: Tensor | float) -> Tensor:
        """Return rows of (B, H, L, X) times a factor, heads of one key head stacked: (b*hk, g*rows, X)."""
        part = x[chunk.batch, chunk.heads, rows].to(self.dtype) * factor
        return part.reshape(chunk.matrices, self.group * part.shape[2], part.shape[3])

    def keys_of(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return the keys or values of a chunk as (b*hk, S, X), in the dtype of the arithmetic."""
        return x[chunk.batch, chunk.kv_heads].to(self.dtype).reshape(chunk.matrices, *x.shape[2:])

    def product(self, chunk: Chunk, x: Tensor, y: Tensor) -> Tensor:
        """Return the tile x yᵀ (b, h, rows, keys) in a buffer, for x (b*hk, g*rows, X), y (b*hk, keys, X)."""
        shape = torch.Size((chunk.batch_size, chunk.head_count, x.shape[1] // self.group, y.shape[1]))
        tile = self.space.take(shape)
        torch.bmm(x, y.transpose(1, 2), out=self.as_matrices(tile))
        return tile

    def as_matrices(self, tile: Tensor) -> Tensor:
        """Return a tile (b, h, rows, keys) as (b*hk, g*rows, keys)."""
        return tile.view(
            tile.shape[0] * tile.shape[1] // self.group, self.group * tile.shape[2], tile.shape[3]
        )

    def filled(self, value: Tensor | float, like: Tensor) -> Tensor:
        """Return a value that spans the tile in a buffer that may be written to; smaller ones are copied."""
        if isinstance(value, Tensor) and value.shape == like.shape:
            return value
        tile = self.space.take(like.shape)
        return tile.copy_(value) if isinstance(value, Tensor) else tile.fill_(value)

    def kept(self, chunk: Chunk, rows: slice, keys: slice) -> Tensor | None:
        """Return the bit mask of the weights that dropout keeps; None without dropout."""
        kept = kept_tile(self.call, chunk.batch, chunk.heads, rows, keys)
        return None if kept is None else bit_mask(kept, self.dtype)

    @cached_property
    def all_finite(self) -> bool:
        """True if q, k, v, the fields and the float mask contain no NaN and Inf."""
        inputs = list(self._inputs().values())
        # A sum is one cheap pass without temporaries. It may overflow, so only its failure is looked at
        # closely.
        if bool(torch.stack([x.sum(dtype=self.dtype) for x in inputs]).isfinite().all()):
            return True
        return all(bool(x.isfinite().all()) for x in inputs)

    def cleaned(self) -> Grid:
        """Return the same grid with NaN and Inf replaced by 0."""
        clean: dict[str, Any] = {name: finite_part(x) for name, x in self._inputs().items()}
        return Grid(dataclasses.replace(self.call, **clean))

    def _inputs(self) -> dict[str, Tensor]:
        tensors = ((name, getattr(self.call, name)) for name in MAY_BE_NONFINITE)
        return {name: x for name, x in tensors if x is not None}

    def poison(self) -> Tensor:
        """Return (B, H, L, Dv): NaN at the outputs that see something non-finite, 0 elsewhere."""
        seen_bad = torch.zeros(
            *self.call.q.shape[:3], self.call.v.shape[3], dtype=torch.bool, device=self.call.q.device
        )
        bad_q, bad_k, bad_v = (~x.isfinite() for x in (self.call.q, self.call.k, self.call.v))
        bad_key_or_value = bad_k.any(-1, keepdim=True) | bad_v
        bad_query = bad_q.any(-1, keepdim=True)
        if self.call.query_fields is not None:
            bad_query = bad_query | ~self.call.query_fields.isfinite().all(0)[..., None]
        key_fields = self.call.spread_key_fields()
        bad_fields = None if key_fields is None else ~key_fields.isfinite().all(0)
        for chunk in self.chunks():
            y = self.keys_of(bad_key_or_value, chunk)
            for rows in self.row_blocks():
                block = (chunk.batch, chunk.heads, rows)
                for keys, mask in self.key_blocks(chunk, rows):
                    shape = (*seen_bad[block].shape[:3], keys.stop - keys.start)
                    seen = torch.ones(shape, dtype=self.dtype, device=self.call.q.device)
                    seen = seen if mask is None else keep_(seen, mask)
                    seen_bad[block] |= (self.as_matrices(seen) @ y[:, keys]).view(seen_bad[block].shape) > 0
                    bad_rows = bad_query[block] & (seen > 0).any(-1, keepdim=True)
                    if bad_fields is not None:
                        bad_keys = bad_fields[chunk.batch, chunk.heads, None, keys]
                        bad_rows |= (bad_keys & (seen > 0)).any(-1, keepdim=True)
                    if self.call.bias is not None:
                        bad_bias = ~take(chunk.of(self.call.bias), rows, keys).isfinite()
                        bad_rows |= (bad_bias & (seen > 0)).any(-1, keepdim=True)
                    seen_bad[block] |= bad_rows
        return torch.where(seen_bad, torch.nan, 0.0).to(self.call.q.dtype)


def size_of(part: slice) -> int:
    """Return the length of a slice with a start and an end."""
    size: int = part.stop - part.start
    return size


def blocks(length: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` that cover 0..length.

    >>> list(blocks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
