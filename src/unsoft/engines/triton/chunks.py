"""The kernels of linear attention (kernel/recurrence.py, kernel/decay.py) with the arguments of one call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.linear.attention import vanishing
from unsoft.engines.triton.call_arguments import precision, view
from unsoft.engines.triton.kernel.structures import ChunkFixed, ChunkShape, States
from unsoft.engines.triton.launch import INTERPRETED_SIZES, Launch, architecture, interpreted, start
from unsoft.engines.triton.tile_sizes import TileSizes

SIZES = {
    "rough": TileSizes(64, 64, 4, 1),
    "float32": TileSizes(64, 32, 4, 1),
    "float64": TileSizes(32, 32, 4, 1),
}
"""Tokens of a chunk and columns of a block, warps and stages, found by compiling for all
targets of the tests: no larger ones leave all numbers of a loop in registers."""
_DECAY_COLUMNS = 32


@dataclass(frozen=True)
class ChunkWork:
    """One call, and the kernels for it."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    weights: Tensor | None
    """Inside chunks, where features come as logarithms."""
    kept: Tensor | None
    causal: bool
    normalise: bool
    rough: bool

    @cached_property
    def sizes(self) -> TileSizes:
        kind = "float64" if self.q.dtype == torch.float64 else "rough" if self.rough else "float32"
        sizes = INTERPRETED_SIZES if interpreted() else SIZES[kind]
        return sizes if self.weights is None else sizes._replace(rows=self.weights.shape[3])

    @property
    def state_heads(self) -> int:
        """A state that decays belongs to a query head."""
        return self.k.shape[1] if self.decay is None else self.q.shape[1]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return len(self.q), self.state_heads, self.q.shape[3], self.v.shape[3] + 1

    @cached_property
    def log_decay(self) -> Tensor | None:
        """log2 d, by torch: a GPU's own is not exact near d = 1. No d^0 is 0 * -inf."""
        if self.decay is None:
            return None
        return self.decay.double().log2().clamp(min=-1e4).to(self.q.dtype)

    def fixed(self, heads: int, read_heads: int, **flags: Any) -> ChunkFixed:
        """For ``heads`` of what is computed and ``read_heads`` of what is read."""
        flags = {"backwards": False, "transposed": False, "totals": False} | flags
        inside = self.causal and not (self.weights is not None and flags["transposed"])
        return ChunkFixed(
            feature_width=self.q.shape[3],
            value_width=self.v.shape[3],
            group=self.q.shape[1] // self.k.shape[1],
            members=max(read_heads // heads, 1),
            shared=max(heads // read_heads, 1),
            causal=self.causal,
            inside=inside,
            decays=self.decay is not None,
            gone=vanishing(self.q.dtype),
            precision=precision(self.q.dtype, self.rough),
            double=self.q.dtype == torch.float64,
            **flags,
        )

    def states(
        self, x: Tensor, y: Tensor, extra: Tensor | None, before: Tensor | None, *, backwards: bool = False
    ) -> tuple[States, Tensor]:
        """The states before each chunk of x and y, or the one that all see, and the state after the last."""
        from unsoft.engines.triton.kernel.recurrence import state_kernel

        (batch, heads, features, columns), tokens = self.state_shape, x.shape[2]
        chunks = -(-tokens // self.sizes.rows) if self.causal else 1
        matrices = x.new_empty(batch, heads, chunks, features, columns - 1)
        states = States(matrices, x.new_empty(batch, heads, chunks, features), chunks)
        after = x.new_empty(self.state_shape)
        arguments = {
            "x": view(x),
            "y": view(y),
            "extra": view(extra),
            "log_decay": self.log_decay,
            "kept": None if self.kept is None else self.kept.contiguous(),
            "start": None if before is None else before.contiguous(),
            "after": after,
            "states": states,
            "shape": ChunkShape(heads, heads, tokens),
            "FIXED": self.fixed(heads, x.shape[1], backwards=backwards),
        }
        blocks = -(-features // self.sizes.keys) * -(-(columns - 1) // self.sizes.keys)
        self._start("state", state_kernel, arguments, (blocks, batch * heads), self.sizes)
        return states, after

    def chunks(
        self, x: Tensor, y: Tensor, z: Tensor, states: States, slopes: Tensor | None, **flags: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows (B, heads of x, tokens of x, columns of z), and the totals they were divided by, if so."""
        from unsoft.engines.triton.kernel.recurrence import chunk_kernel

        (batch, heads, tokens, _), width = x.shape, z.shape[3]
        fixed = self.fixed(heads, y.shape[1], **flags)
        out = x.new_empty(batch, heads, tokens, width)
        totals = x.new_empty(batch, heads, tokens) if fixed.totals else x.new_empty(0)
        arguments = {
            "x": view(x),
            "y": view(y),
            "z": view(z),
            "slopes": view(slopes),
            "given": view(self.weights),
            "log_decay": self.log_decay,
            "states": states,
            "out": view(out),
            "totals": totals if fixed.totals else None,
            "shape": ChunkShape(heads, self.state_heads, tokens),
            "FIXED": fixed,
        }
        blocks = -(-tokens // self.sizes.rows) * -(-width // self.sizes.keys)
        sizes = self.sizes._replace(warps=self.sizes.warps * self._more_warps(fixed))
        self._start("chunk", chunk_kernel, arguments, (blocks, batch * heads), sizes)
        return out, totals

    def _more_warps(self, fixed: ChunkFixed) -> int:
        """How many times as many warps as usual a gradient needs on Blackwell, where fewer have not enough
        registers for the numbers of its loop; found by compiling."""
        known = "" if interpreted() else architecture(torch.cuda.current_device())
        if known.startswith("sm_10") and fixed.backwards:
            wide = max(fixed.feature_width, fixed.value_width) > self.sizes.keys
            return 4 if wide and fixed.decays and not fixed.transposed else 2
        return 2 if known.startswith("sm_12") and fixed.transposed and self.weights is not None else 1

    def decay_gradient(
        self, grad: Tensor, slopes: Tensor | None, states: States, later: States, decay: Tensor
    ) -> Tensor:
        """Of the loss with respect to d (H)."""
        from unsoft.engines.triton.kernel.decay import decay_kernel

        batch, heads, tokens, _ = self.q.shape
        out = self.q.new_empty(batch, heads, states.chunks)
        arguments = {
            "q": view(self.q),
            "k": view(self.k),
            "v": view(self.v),
            "grad": view(grad),
            "slopes": view(slopes),
            "log_decay": self.log_decay,
            "states": states,
            "later": later,
            "out": out,
            "shape": ChunkShape(heads, heads, tokens),
            "FIXED": self.fixed(heads, self.k.shape[1]),
        }
        sizes = self.sizes._replace(keys=min(self.sizes.keys, _DECAY_COLUMNS))
        self._start("decay", decay_kernel, arguments, (states.chunks, batch * heads), sizes)
        return out.sum((0, 2)) / decay

    def _start(
        self, name: str, kernel: Any, arguments: dict[str, Any], grid: tuple[int, int], sizes: TileSizes
    ) -> None:
        start(Launch(name, kernel, arguments, lambda _: grid, "", self.q.dtype, (sizes,)))
