"""What a definition gets: one call, written out in float64, with every rule about visibility applied already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


class NotDefined(Exception):
    """No formula says what the mechanism does here; the message is the reason."""


@dataclass(frozen=True)
class WrittenCall:
    """Some rows of a call to a mechanism.

    Rows of attention do not know each other, so a definition may be asked for some of them only: R of the L queries, at the
    positions ``rows``. All S keys are there, and what is masked is said by ``visible`` alone, causality included.
    """

    query: Tensor
    """(B, H, R, D)"""
    key: Tensor
    """(B, Hk, S, D)"""
    value: Tensor
    """(B, Hk, S, Dv)"""
    visible: Tensor
    """Bool (B, H, R, S)"""
    bias: Tensor
    """(B, H, R, S): the float mask, 0 where there is none or where it hides."""
    there: Tensor
    """Bool (B, H, S): keys that the masks alone let some row of the whole call see (padding is not there)."""
    rows: Tensor
    """(R,) positions i, counted from the first key."""
    causal: bool
    scale: float
    rounding: Callable[[Tensor], Tensor] | None = None
    """What rounding does to an intermediate result, where it is measured how much that matters."""
    strength: bool = False
    """Does the float mask multiply weight and mass by its exponential, whatever the mechanism's own rule is?"""

    @property
    def count(self) -> Tensor:
        """(B, H, R, 1): n, the number of keys a row sees; 1 for a row that sees none."""
        return self.visible.sum(-1, keepdim=True).clamp(min=1).to(self.query.dtype)

    @property
    def keys(self) -> Tensor:
        """(S,) positions j."""
        return torch.arange(self.key.shape[2], dtype=self.query.dtype)

    @property
    def logits(self) -> Tensor:
        """(B, H, R, S): scale q . k, without the mask."""
        return self.move(self.scale * (self.query @ self.spread(self.key).mT))

    def move(self, x: Tensor) -> Tensor:
        """An intermediate result, or that with a rounding error."""
        return x if self.rounding is None else self.rounding(x)

    def spread(self, x: Tensor) -> Tensor:
        """A tensor (B, Hk, ...) of the key heads, for every query head: head h reads key head h // group."""
        return x.repeat_interleave(self.query.shape[1] // x.shape[1], dim=1)

    def change(self, **changes: Any) -> WrittenCall:
        return replace(self, **changes)


def over(x: Tensor, total: Tensor) -> Tensor:
    """x / total, and 0 where the total is 0, with gradients that are 0 there too."""
    nothing = total == 0
    return torch.where(nothing, 0.0, x / torch.where(nothing, 1.0, total))


def shares(log: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible entries; a row that sees nothing is 0."""
    hidden = ~visible
    weights = log.masked_fill(hidden, -torch.inf).masked_fill(hidden.all(-1, keepdim=True), 0.0).softmax(-1)
    return weights.masked_fill(hidden, 0.0)
