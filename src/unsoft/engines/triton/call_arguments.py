"""The launches of a call's forward and backward kernels: views of its tensors, numbers, compile-time
constants."""

from __future__ import annotations

import math
import struct
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import Call
from unsoft.engines.dropout import keep_factor
from unsoft.engines.triton.launch import Grid, Launch, interpreted
from unsoft.engines.triton.source import kernels
from unsoft.engines.triton.structures import (
    Context,
    Extras,
    Fixed,
    KernelInputs,
    KernelParts,
    KernelResults,
    Numbers,
    Shape,
    View,
)
from unsoft.engines.triton.tile_sizes import TileSizes

MOST_ROWS = 64
"""Queries times query heads of one key head that still count as few."""
FEW = 16
_SMALLEST_SPLIT = 256
_MOST_SPLITS = 64
_INTERPRETED = (3, 16)
"""Splits and keys of a tile in Triton's interpreter: small, so that small tests have several."""


class CallArguments:
    """Arguments that all kernels of a call share. Holds the tensors until the kernels have been started."""

    def __init__(self, call: Call) -> None:
        # A tensor with the negative bit set (x.conj().imag) stores the negated values, which kernels would
        # read.
        q, k, v = (x.resolve_neg() for x in (call.q, call.k, call.v))
        self.call, self.qkv = call, (q, k, v)
        self.code = kernels(call.formula.key, call.bias is not None)
        (batch, heads, length, width), (_, kv_heads, keys, value_width) = q.shape, v.shape
        full = (batch, heads, length, keys)
        row_positions = key_positions = None
        if call.positions is not None:
            both = call.positions.expand(batch, -1)[:, None].expand(-1, heads, -1)
            row_positions, key_positions = both[..., :length], both[..., length:]
        self.inputs = KernelInputs(view(q), view(k), view(v))
        self.context = Context(
            Extras(
                view(None if call.visible is None else call.visible.view(torch.uint8).expand(full)),
                view(None if call.bias is None else call.bias.resolve_neg().expand(full)),
                view(None if call.counts is None else call.counts.expand(full[:3])),
                view(row_positions),
                view(key_positions),
                fields_view(call.query_fields),
                fields_view(call.spread_key_fields()),
                call.params.resolve_neg().contiguous(),
                call.seed,
            ),
            Numbers(
                *two_floats(call.scale),
                *two_floats(keep_factor(call.dropout_p)),
                round(call.dropout_p * 2**32),
            ),
            Shape(heads, length, keys, call.causal_offset or 0),
        )
        self.fixed = Fixed(
            group=heads // kv_heads,
            width=width,
            padded=padded(width),
            value_width=value_width,
            value_padded=padded(value_width),
            causal=call.causal_offset is not None,
            precision=precision(q.dtype),
            double=q.dtype == torch.float64,
            exact=False,
        )

    @cached_property
    def flag(self) -> Tensor:
        """NaN or Inf if the inputs have any (or if their sum overflows: the exact kernels then run in
        vain)."""
        optional = (self.call.bias, self.call.query_fields, self.call.key_fields)
        inputs = [*self.qkv, *(x for x in optional if x is not None)]
        return torch.stack([x.sum(dtype=self.call.compute_dtype) for x in inputs]).sum()

    def by_rows(self, name: str, exact: bool, **arguments: Any) -> Launch:
        """Return the launch of a kernel whose programs own blocks of rows."""
        batch, heads, length, _ = self.qkv[0].shape
        return self._fast_or_exact(
            name, exact, lambda sizes: (-(-length // sizes.rows), batch * heads), arguments
        )

    def by_keys(self, name: str, exact: bool, **arguments: Any) -> Launch:
        """Return the launch of a kernel whose programs own blocks of keys."""
        batch, kv_heads, keys, _ = self.qkv[1].shape
        return self._fast_or_exact(
            name, exact, lambda sizes: (-(-keys // sizes.keys), batch * kv_heads), arguments
        )

    def few_queries(self, results: KernelResults) -> list[Launch]:
        """Return the two launches of decoding: sums over parts of the keys, then one row from its parts.

        The keys are split among programs, so that the whole GPU reads them."""
        batch, kv_heads, keys, _ = self.qkv[1].shape
        heads, length = self.qkv[0].shape[1:3]
        rows = padded(heads // kv_heads * length)
        splits, tile = _INTERPRETED if interpreted() else (_splits(batch * kv_heads, keys), 64)
        widths = (self.fixed.value_padded, 1, 1)
        new_empty, shape = results.peaks.new_empty, (batch, kv_heads, splits, rows)
        shared: dict[str, Any] = {
            "parts": KernelParts(*(new_empty(*shape, width) for width in widths)),
            "context": self.context,
        }
        shared["FIXED"] = self.fixed._replace(exact=True)
        decode = {**shared, "inputs": self.inputs, "chunk": -(-keys // (splits * tile)) * tile}
        combine = {**shared, "results": results, "splits": splits, "ROWS": rows}
        tiles = tuple(TileSizes(rows, width, 4, stages) for width, stages in _decode_tiles(tile))
        all_splits = TileSizes(16, 1 << (splits - 1).bit_length(), 4, 1)
        return [
            self._launch("decode", lambda _: (splits, batch * kv_heads), decode, tiles),
            self._launch("combine", lambda _: (length, batch * heads), combine, (all_splits,)),
        ]

    def _fast_or_exact(self, name: str, exact: bool, grid: Grid, arguments: dict[str, Any]) -> Launch:
        shared = {"inputs": self.inputs, "context": self.context, "flag": self.flag}
        return self._launch(name, grid, {**shared, **arguments, "FIXED": self.fixed._replace(exact=exact)})

    def _launch(
        self, name: str, grid: Grid, arguments: dict[str, Any], sizes: tuple[TileSizes, ...] = ()
    ) -> Launch:
        kernel, dtype = getattr(self.code, f"{name}_kernel"), self.call.q.dtype
        return Launch(name, kernel, arguments, grid, self.call.formula.key, dtype, sizes)


def has_few_queries(call: Call) -> bool:
    """Return True if a call should be split over its keys.

    >>> from unsoft.engines.arguments import checked_call
    >>> from unsoft.formula import Formula
    >>> q, k = torch.zeros(1, 8, 1, 64), torch.zeros(1, 2, 1000, 64)
    >>> has_few_queries(checked_call(q, k, k, Formula("s/n"), enable_gqa=True)[0])
    True
    """
    length, group = call.q.shape[2], call.q.shape[1] // call.k.shape[1]
    return length <= FEW and length * group <= MOST_ROWS


def _decode_tiles(keys: int) -> list[tuple[int, int]]:
    """Return keys of a tile and stages of the pipeline, to try until one has room; all divide the first."""
    return [(keys, 2), *((smaller, 1) for smaller in (keys, keys // 2, keys // 4) if smaller >= 16)]


def _splits(programs: int, keys: int) -> int:
    """Return as many splits as give every multiprocessor two programs, without splits that are too short."""
    wanted = -(-2 * torch.cuda.get_device_properties().multi_processor_count // programs)
    return max(1, min(wanted, -(-keys // _SMALLEST_SPLIT), _MOST_SPLITS))


def view(x: Tensor | None) -> View:
    """Return a tensor as kernels take it."""
    return View(None, (0, 0, 0, 0)) if x is None else View(x, x.stride())


def views(**tensors: Tensor | None) -> dict[str, View]:
    """Return tensors as kernels take them, by name."""
    return {name: view(x) for name, x in tensors.items()}


def fields_view(x: Tensor | None) -> View:
    """Return fields (F, B, H, rows), or their gradients, as a view (B, H, rows, F)."""
    return view(None if x is None else x.resolve_neg().permute(1, 2, 3, 0))


def padded(width: int) -> int:
    """Return the next power of two, at least 16, the smallest width of matrix instructions."""
    return max(16, 1 << (width - 1).bit_length())


def two_floats(x: float) -> tuple[float, float]:
    """Return two float32 whose sum is ``x``, since Triton passes numbers as float32.

    >>> high, low = two_floats(0.1)
    >>> high + low - 0.1
    0.0
    """
    high: float = struct.unpack("f", struct.pack("f", x))[0] if abs(x) < 3e38 else math.copysign(3e38, x)
    return high, x - high


def precision(dtype: torch.dtype, rough: bool = False) -> str:
    """Return how matrices of float32 are multiplied, as tl.dot names it.

    TF32 only if the user allowed it for all of torch or ``rough`` says that it is enough. Otherwise three
    TF32 products, which together have the precision of float32. AMD multiplies float32 in hardware."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    return "tf32" if rough or _tf32_is_allowed() else "tf32x3"


def _tf32_is_allowed() -> bool:
    """Return the user's choice by ``torch.set_float32_matmul_precision`` or the switch of torch >= 2.9. Once
    the latter was used, reading the former raises."""
    switch = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() != "highest" if switch is None else switch == "tf32"
