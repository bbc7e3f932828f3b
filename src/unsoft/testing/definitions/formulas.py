"""The built-in formulas once more, from their papers, in plain torch: a function from one call's logits to its weights.

Weights that are normalised by exponentials are written as a coefficient and an exponent each, so that they can be computed
at any size of the logits: weight = sum of c exp(e), total mass = sum of c exp(e) over the keys and the offsets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unsoft.formula import Formula, evaluate
from unsoft.testing.definitions.call import WrittenCall, over


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
    """Does the float mask multiply weights by its exponential, although the weights are not signed?"""

    @property
    def added(self) -> Tensor:
        """The logit with the float mask added."""
        return self.s if self.strength else self.s + self.bias

    @property
    def boost(self) -> Tensor:
        """What is left to be added to exponents."""
        return self.bias if self.strength else torch.zeros_like(self.bias)


Term = tuple[Tensor | float, Tensor]
"""A coefficient and an exponent."""
Pointwise = Callable[[Logits], Tensor]


def normalised(
    x: Logits, weight: Sequence[Term], mass: Sequence[Term], boost: Tensor, offsets: Sequence[float] = (), power: float = 1.0
) -> Tensor:  # fmt: skip
    """Weights over (total mass)^(1 / power), all times exp(boost); the masses are those of the weights to the ``power``."""
    hidden = ~x.visible

    def exponent(e: Tensor) -> Tensor:
        return (e + boost).expand(x.visible.shape).masked_fill(hidden, -torch.inf)

    extra = [torch.full_like(x.s[..., :1], float(o)) for o in offsets]
    if x.sink is not None:
        extra.append(x.sink.expand(*x.s.shape[:-1], 1))
    highest = torch.cat([exponent(e) for _, e in (*weight, *mass)] + extra, dim=-1).detach()
    highest = torch.cat([highest, torch.full_like(x.s[..., :1], -torch.inf)], dim=-1).amax(-1, keepdim=True)
    highest = torch.where(highest.isfinite(), highest, 0.0)
    top = sum(c * (exponent(e) - highest).exp() for c, e in weight)
    total = sum((c * (power * (exponent(e) - highest)).exp()).sum(-1, keepdim=True) for c, e in mass)
    total = total + sum((power * (e - highest)).exp() for e in extra)
    return over(top, total if power == 1.0 else _root(total, power))


def _root(total: Tensor, power: float) -> Tensor:
    return torch.where(total == 0, 0.0, torch.where(total == 0, 1.0, total) ** (1 / power))


def softmax(x: Logits) -> Tensor:
    return normalised(x, [(1.0, x.s)], [(1.0, x.s)], x.bias)


def softmax1(x: Logits) -> Tensor:
    return normalised(x, [(1.0, x.s)], [(1.0, x.s)], x.bias, offsets=[0.0])


def l2(x: Logits) -> Tensor:
    return normalised(x, [(1.0, x.s)], [(1.0, x.s)], x.bias, power=2.0)


def cog(x: Logits) -> Tensor:
    return normalised(x, [(x.s.sign(), x.s.abs())], [(1.0, x.s.abs())], x.bias)


def sinh(x: Logits) -> Tensor:
    return normalised(x, [(0.5, x.s), (-0.5, -x.s)], [(0.5, x.s), (0.5, -x.s)], x.bias)


def swishmax(x: Logits) -> Tensor:
    return normalised(x, [(x.s, x.s)], [(x.s.abs(), x.s)], x.bias, offsets=[0.0])


def softpick(x: Logits) -> Tensor:
    """exp(s) - 1 is exp(max(s, 0)) times 1 - exp(-|s|), with the sign of s."""
    s = x.added
    size = -torch.expm1(-s.abs())
    return normalised(x, [(size * (s > 0), s.relu())], [(size, s.relu())], x.boost)


def relu(x: Logits) -> Tensor:
    return x.added.relu() * x.boost.exp() / x.n


def relu2(x: Logits) -> Tensor:
    return x.added.relu() ** 2 * x.boost.exp() / x.n


def sigmoid(x: Logits) -> Tensor:
    return (x.added - x.n.log()).sigmoid() * x.boost.exp()


def tanh(x: Logits) -> Tensor:
    return x.s.tanh() * x.bias.exp() / x.n


def identity(x: Logits) -> Tensor:
    return x.s * x.bias.exp() / x.n


def polynomial(p: int) -> Pointwise:
    """Odd powers are signed: the float mask acts on the strength."""

    def weights(x: Logits) -> Tensor:
        power = x.s**p * x.bias.exp() if p % 2 else x.added**p * x.boost.exp()
        return power / x.n.sqrt()

    return weights


BUILT_IN: dict[str, Pointwise] = {
    "cog": cog,
    "identity": identity,
    "l2": l2,
    "polynomial": polynomial(3),
    "relu": relu,
    "relu2": relu2,
    "sigmoid": sigmoid,
    "sinh": sinh,
    "softmax": softmax,
    "softmax1": softmax1,
    "softpick": softpick,
    "swishmax": swishmax,
    "tanh": tanh,
}


def sink(inner: Pointwise, level: Tensor) -> Pointwise:
    """One more logit per head in the normaliser, without a value."""
    return lambda x: inner(replace(x, sink=level[:, None, None]))


def logn(inner: Pointwise, n0: float, least: float = 1.0) -> Pointwise:
    """s log(n) / log(n0), with n at least ``least``; a float mask is added after it."""
    return lambda x: inner(replace(x, s=x.s * x.n.clamp(min=least).log() / math.log(n0)))


def from_text(formula: Formula, params: Mapping[str, Tensor]) -> Pointwise:
    """A formula of a user's own, evaluated as it stands: its text is its definition."""

    def weights(x: Logits) -> Tensor:
        strength = formula.mask_target is None or x.strength
        boost = x.bias if strength else torch.zeros_like(x.bias)
        env = {"s": x.s if strength else x.s + x.bias, "n": x.n, "i": x.i, "j": x.j}
        env |= {name: value[:, None, None] for name, value in params.items()}
        shape = x.visible.shape
        if formula.peak is not None:
            peaks = (evaluate(formula.peak, env) + boost).expand(shape).masked_fill(~x.visible, -torch.inf)
            lowest = peaks.new_full((*shape[:3], 1), -torch.inf)
            env["m"] = torch.cat([peaks, lowest], -1).amax(-1, keepdim=True).nan_to_num(neginf=0.0).detach()
        # Where nothing is visible any finite logit will do: what is hidden is taken out below.
        env["s"] = torch.where(x.visible, env["s"], 0.0)
        weight = torch.where(x.visible, evaluate(formula.weight, env).expand(shape) * boost.exp(), 0.0)
        if formula.mass is None:
            return weight
        mass = evaluate(formula.mass, env).expand(shape) * (formula.mass_degree * boost).exp()
        total = torch.where(x.visible, mass, 0.0).sum(-1, keepdim=True)
        row = {name: value for name, value in env.items() if name not in ("s", "j")}
        if formula.offset_mass is not None:
            total = total + evaluate(formula.offset_mass, row)
        if formula.norm is not None:
            total = evaluate(formula.norm, row | {"z": total})
        return over(weight, total)

    return weights


def logits_of(call: WrittenCall, query: Tensor | None = None) -> Logits:
    """The logits of a call, or of another query in its place."""
    call = call if query is None else call.change(query=query)
    return Logits(
        call.logits,
        call.bias,
        call.visible,
        call.count,
        call.rows[:, None],
        call.keys,
        strength=call.strength,
    )


def visible_part(weights: Tensor, visible: Tensor) -> Tensor:
    """The weights, exactly 0 where nothing may be seen."""
    return torch.where(visible, weights, 0.0)
