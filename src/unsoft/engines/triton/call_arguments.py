"""A call as the kernels take it: views of its tensors, its numbers, and what a kernel is compiled for."""

from __future__ import annotations

import math
import struct
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import Call
from unsoft.engines.dropout import keep_factor
from unsoft.engines.triton.kernel.structures import Extras, Fixed, Numbers, Shape, View
from unsoft.engines.triton.launch import Grid, Launch
from unsoft.engines.triton.source import Kernels, kernels


class CallArguments:
    """What all kernels of a call are given; what is there, is held until they have been started."""

    def __init__(self, call: Call) -> None:
        # What lies in the memory of a negative view (x.conj().imag is one) is not what it stands for.
        self.q, self.k, self.v = (x.resolve_neg() for x in (call.q, call.k, call.v))
        self.call = call
        self.code: Kernels = kernels(call.formula.key, call.bias is not None)
        (batch, heads, length, width), (_, kv_heads, keys, value_width) = self.q.shape, self.v.shape
        full = (batch, heads, length, keys)
        self.full = full
        rows = keys_at = None
        if call.positions is not None:
            both = call.positions.expand(batch, -1)[:, None].expand(-1, heads, -1)
            rows, keys_at = both[..., :length], both[..., length:]
        seen = None if call.visible is None else call.visible.view(torch.uint8).expand(full)
        self.arguments: dict[str, Any] = {
            "q": view(self.q),
            "k": view(self.k),
            "v": view(self.v),
            "extras": Extras(
                view(seen),
                view(None if call.bias is None else call.bias.resolve_neg().expand(full)),
                view(None if call.counts is None else call.counts.expand(full[:3])),
                view(rows),
                view(keys_at),
                fields_view(call.query_fields),
                fields_view(call.spread_key_fields()),
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
            precision=precision(self.q.dtype),
            double=self.q.dtype == torch.float64,
            exact=False,
        )

    @cached_property
    def flag(self) -> Tensor:
        """NaN or Inf if there is any in the inputs (or if their sum overflows, which costs time but changes
        nothing)."""
        call = self.call
        given = (self.q, self.k, self.v, call.bias, call.query_fields, call.key_fields)
        inputs = [x for x in given if x is not None]
        return torch.stack([x.sum(dtype=self.call.compute_dtype) for x in inputs]).sum()

    def by_rows(self, name: str, exact: bool, **arguments: Any) -> Launch:
        """A kernel whose programs own blocks of rows."""
        batch, heads, length, _ = self.full
        return self._launch(name, exact, lambda sizes: (-(-length // sizes.rows), batch * heads), arguments)

    def by_keys(self, name: str, exact: bool, **arguments: Any) -> Launch:
        """A kernel whose programs own blocks of keys."""
        batch, kv_heads, keys, _ = self.k.shape
        return self._launch(name, exact, lambda sizes: (-(-keys // sizes.keys), batch * kv_heads), arguments)

    def _launch(self, name: str, exact: bool, grid: Grid, arguments: dict[str, Any]) -> Launch:
        given = {**self.arguments, **arguments, "flag": self.flag, "FIXED": self.fixed._replace(exact=exact)}
        return Launch(name, getattr(self.code, name), given, grid, self.call.formula.key, self.q.dtype)


def view(x: Tensor | None) -> View:
    """A tensor as kernels take it."""
    return View(None, (0, 0, 0, 0)) if x is None else View(x, x.stride())


def fields_view(x: Tensor | None) -> View:
    """Fields, or their gradients, as kernels take them: (F, B, H, rows) seen as (B, H, rows, F)."""
    return view(None if x is None else x.resolve_neg().permute(1, 2, 3, 0))


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


def precision(dtype: torch.dtype, rough: bool = False) -> str:
    """How matrices of float32 are multiplied: TF32 only if the user allowed it for all of torch, otherwise
    three TF32 products that together have the precision of float32. AMD has that in hardware. ``rough``:
    TF32 is enough."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    return "tf32" if rough or _tf32_is_allowed() else "tf32x3"


def _tf32_is_allowed() -> bool:
    """By ``torch.set_float32_matmul_precision``, or by the switch of torch >= 2.9: if that was used, asking
    the older one is an error."""
    found = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() != "highest" if found is None else found == "tf32"
