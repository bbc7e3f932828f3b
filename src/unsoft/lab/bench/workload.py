"""What is computed: the shapes, the dtype and the direction of one measurement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SEED = 20_241_107
MODES = ("forward", "training")
"""Of calls; "step" is one more, a step of decoding with a cache."""


@dataclass(frozen=True)
class Workload:
    """One attention problem. ``group`` names the set of measurements it belongs to;
    "training" = forward + backward.

    >>> Workload("main", queries=512, keys=512, is_causal=True).label
    '512 causal'
    >>> Workload("short", queries=16, keys=4096).label
    '16 x 4096'
    """

    group: str
    queries: int
    keys: int
    batch: int = 1
    heads: int = 8
    width: int = 64
    dtype: str = "float32"
    is_causal: bool = False
    mode: str = "forward"
    device: str = "cpu"

    @property
    def label(self) -> str:
        """A short name inside the group."""
        if self.mode == "step":
            return f"step at {self.keys}"
        size = f"{self.queries}" if self.queries == self.keys else f"{self.queries} x {self.keys}"
        return f"{size} causal" if self.is_causal else size

    def inputs(self) -> Inputs:
        """Normally distributed q, k, v and output gradient, the same in every run;
        logits have about unit size."""
        generator = torch.Generator().manual_seed(SEED)
        lengths = (self.queries, self.keys, self.keys, self.queries)
        q, k, v, grad_out = (
            torch.randn(self.batch, self.heads, length, self.width, generator=generator).to(
                self.device, getattr(torch, self.dtype)
            )
            for length in lengths
        )
        if self.mode == "training":
            for x in (q, k, v):
                x.requires_grad_()
        return Inputs(q, k, v, grad_out)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a workload, each of shape (batch, heads, length, width)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v
