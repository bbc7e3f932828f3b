"""One attention call after every argument has been checked: the only thing that an engine sees."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import Formula


@dataclass(frozen=True)
class Call:
    """A checked call in one fixed layout.

    Legend: B batch, H query heads, Hk key/value heads (H is a multiple of Hk, query head h reads key head
    h // (H // Hk)), L queries, S keys, D and Dv head dimensions, P formula parameters; "B|1" = may be 1,
    meaning the same for all. ``compute_dtype`` is float64 for float64 inputs and float32 for all others.
    """

    q: Tensor
    """(B, H, L, D)"""
    k: Tensor
    """(B, Hk, S, D)"""
    v: Tensor
    """(B, Hk, S, Dv)"""
    formula: Formula
    params: Tensor
    """(P, H) in compute_dtype, one row per name of ``formula.params``, sorted by name."""
    visible: Tensor | None = None
    """Bool (B|1, H|1, L|1, S|1), False = masked; None = no mask."""
    bias: Tensor | None = None
    """Additive mask, same shapes, compute_dtype, with masked entries 0; None = no additive mask."""
    causal_offset: int | None = None
    """Key j is visible to row i only if j <= i + causal_offset; None = not causal."""
    counts: Tensor | None = None
    """(B|1, H|1, L) visible keys of each row, at least 1, compute_dtype; given iff the formula uses ``n``."""
    positions: Tensor | None = None
    """(B|1, L + S) the symbols i of all queries, then j of all keys, compute_dtype; given only if the formula uses them.
    None = rows count from ``causal_offset`` and keys from 0."""
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: Tensor | None = None
    """Two words (see dropout.py); given iff dropout_p > 0."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.q.dtype)

    @property
    def fused_arguments(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """The positional tensors and the keywords of the fused engines' ``forward``."""
        masks = (self.visible, self.bias, self.counts, self.positions)
        tensors = (self.q, self.k, self.v, *masks, self.params, self.seed)
        options = {
            "formula": self.formula.key,
            "causal_offset": self.causal_offset,
            "scale": self.scale,
            "dropout_p": self.dropout_p,
        }
        return tensors, options


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where the arithmetic happens: float64 stays, everything narrower is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite_part(x: Tensor) -> Tensor:
    """The tensor with NaN and Inf replaced by 0, in value and in gradient."""
    return torch.where(x.isfinite(), x, 0.0)
