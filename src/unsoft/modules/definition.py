"""Definitions that mechanisms are tested against: their papers again in plain torch, slow and in float64.

The definition of a mechanism is in its file and is passed to the registry. It shares nothing with the
engines, nor with the code beside it, of which only parameters and settings are read. A formula's is a
function from :class:`Logits` to weights; a module's one from a :class:`WrittenCall` and the layer to weights
(B, heads, R, S), or to weights and output where the output is more than weights times values; that of a
module that runs a formula gets the definition of the formula too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Defined = tuple[Tensor, Tensor]
"""Weights and output."""
Layer = Any
"""The module that a definition belongs to; its parameters and settings are read, and nothing else."""
Definition = Callable[["WrittenCall", Layer], Defined]


class NotDefined(Exception):
    """The mechanism has no definition for this call; the message is the reason."""


@dataclass(frozen=True)
class WrittenCall:
    """Some rows of a call to a mechanism.

    Rows of attention are independent, so a definition may be computed for some of them only: R of the L
    queries, at the positions ``rows``. All S keys are present; ``visible`` alone has the masks, causality
    included.
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
    """Adds a rounding error to an intermediate result, to measure how much rounding matters."""
    strength: bool = False
    """True if the float mask multiplies weight and mass by its exponential, whatever the mechanism's own
    rule is."""

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
        """Return an intermediate result, with a rounding error if ``rounding`` is set."""
        return x if self.rounding is None else self.rounding(x)

    def spread(self, x: Tensor) -> Tensor:
        """Repeat a tensor (B, Hk, ...) of the key heads for every query head: head h reads key head h //
        group."""
        return x.repeat_interleave(self.query.shape[1] // x.shape[1], dim=1)

    def change(self, **changes: Any) -> WrittenCall:
        return replace(self, **changes)


def over(x: Tensor, total: Tensor) -> Tensor:
    """Return x / total, and 0 where the total is 0, with gradients that are 0 there too."""
    nothing = total == 0
    return torch.where(nothing, 0.0, x / torch.where(nothing, 1.0, total))


def shares(log: Tensor, visible: Tensor) -> Tensor:
    """Return the softmax over the visible entries; a row that sees nothing is 0."""
    hidden = ~visible
    weights = log.masked_fill(hidden, -torch.inf).masked_fill(hidden.all(-1, keepdim=True), 0.0).softmax(-1)
    return weights.masked_fill(hidden, 0.0)


@dataclass(frozen=True)
class Logits:
    """The logits of a call and what else a formula may look at; every tensor broadcasts to (B, H, R, S)."""

    s: Tensor
    bias: Tensor
    visible: Tensor
    n: Tensor
    i: Tensor
    j: Tensor
    sink: Tensor | None = None
    """A logit per head that takes part in the normaliser only."""
    strength: bool = False
    """True if the float mask multiplies weights by its exponential, although the weights are not signed."""
    squares: Mapping[str, Tensor] = field(default_factory=dict)
    """q2 and k2: scale |q|^2 and scale |k|^2."""

    @property
    def added(self) -> Tensor:
        """The logit with the float mask added."""
        return self.s if self.strength else self.s + self.bias

    @property
    def boost(self) -> Tensor:
        """The float mask, where it is not in :attr:`added`."""
        return self.bias if self.strength else torch.zeros_like(self.bias)


Term = tuple[Tensor | float, Tensor]
"""A coefficient and an exponent."""
Pointwise = Callable[[Logits], Tensor]


def normalised(
    x: Logits,
    weight: Sequence[Term],
    mass: Sequence[Term],
    boost: Tensor,
    offsets: Sequence[float] = (),
    power: float = 1.0,
) -> Tensor:
    """Return weights over (total mass)^(1 / power), all times exp(boost); the masses are those of the weights
    to the ``power``."""
    hidden = ~x.visible

    def exponent(e: Tensor) -> Tensor:
        return (e + boost).expand(x.visible.shape).masked_fill(hidden, -torch.inf)

    extra = [torch.full_like(x.s[..., :1], float(o)) for o in offsets]
    if x.sink is not None:
        extra.append(x.sink.expand(*x.s.shape[:-1], 1))
    highest = torch.cat([exponent(e) for _, e in (*weight, *mass)] + extra, dim=-1).detach()
    highest = torch.cat([highest, torch.full_like(x.s[..., :1], -torch.inf)], dim=-1).amax(-1, keepdim=True)
    highest = torch.where(highest.isfinite(), highest, 0.0)
    top = torch.stack([c * (exponent(e) - highest).exp() for c, e in weight]).sum(0)
    masses = [(c * (power * (exponent(e) - highest)).exp()).sum(-1, keepdim=True) for c, e in mass]
    total = torch.stack([*masses, *((power * (e - highest)).exp() for e in extra)]).sum(0)
    return over(top, total if power == 1.0 else _root(total, power))


def _root(total: Tensor, power: float) -> Tensor:
    return torch.where(total == 0, 0.0, torch.where(total == 0, 1.0, total) ** (1 / power))


def logits_of(call: WrittenCall, query: Tensor | None = None) -> Logits:
    """Return the logits of a call, or of another query in its place."""
    call = call if query is None else call.change(query=query)
    squares = {
        "q2": call.scale * call.query.square().sum(-1)[..., None],
        "k2": call.scale * call.spread(call.key).square().sum(-1)[..., None, :],
    }
    masks, places = (call.bias, call.visible), (call.count, call.rows[:, None], call.keys)
    return Logits(call.logits, *masks, *places, strength=call.strength, squares=squares)


def visible_part(weights: Tensor, visible: Tensor) -> Tensor:
    """Return the weights, exactly 0 where a key is hidden."""
    return torch.where(visible, weights, 0.0)


def mask_factor(call: WrittenCall) -> Tensor:
    """Return the exponential of a float mask, which multiplies weights; 0 where a key is hidden."""
    return torch.where(call.visible, call.bias.exp(), 0.0)


def over_sum(call: WrittenCall, weights: Tensor) -> Tensor:
    weights = weights * mask_factor(call)
    return over(weights, weights.sum(-1, keepdim=True))


def scaled(call: WrittenCall) -> tuple[Tensor, Tensor]:
    root = abs(call.scale) ** 0.5
    return call.move(call.query * math.copysign(root, call.scale)), call.move(call.spread(call.key) * root)


def shares_of_sums(call: WrittenCall, query: Tensor, key: Tensor) -> Tensor:
    """Return the shares of sum_f exp(query_f + key_f), a row at a time: all features of all pairs at once
    would not fit into memory."""
    rows = [(query[:, :, r, None, :] + key).logsumexp(-1) for r in range(query.shape[2])]
    log = torch.stack(rows, dim=2) if rows else query.new_zeros(call.visible.shape)
    return shares(log + call.bias, call.visible)
