"""Hijacking: the share of a row that a unique key keeps against m identical ones (Rosić 2026).

One key has the logit u, m clones have the logit c; there are no other keys. Under a pointwise mechanism the
unique key has

    share = |f(u)| / (|f(u)| + m |f(c)|)

whatever its normaliser. The magnitude of the keys counts the clones as one: (Z + eps I) w = 1, with Z = 1
between clones and 0 between them and the unique key, far away, has the solution

    w_unique = 1 / (1 + eps)        w_clone = 1 / (m + eps)

and a gate g(w) multiplies either the values, after normalisation, or the mass, before it. The density of a
clone is m, so that the density correction leaves m clones the mass of m^(1 - p).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.checks import one_of
from unsoft.theory.arguments import Mechanism, Numbers, read_at_least, read_numbers
from unsoft.theory.weight import Weight, formula_of

CLONE = 1.0
UNIQUE = CLONE + math.log(20)
"""Default logits: by exp, the unique key is 20 times as relevant as a clone, the example of Rosić 2026.

A clone logit of 0 would give the same ratio for softmax, but cog, sinh, identity, relu and relu2 have the
weight 0 there: any number of clones would take nothing, and the mechanism would look immune.
"""


class MagnitudeHijack(NamedTuple):
    """Factors of the unique key's value and of all clones together in the output; share of the first."""

    unique: Tensor
    clones: Tensor
    share: Tensor


def hijack_share(
    mechanism: Mechanism, clones: Numbers, *, unique: Numbers = UNIQUE, clone: Numbers = CLONE
) -> Tensor:
    """Return the share of absolute weight that a key of logit ``unique`` keeps against clones of ``clone``.

    A formula that depends on n gets n = clones + 1. By default clones have the logit 1 and the unique key
    1 + log(20), as in :func:`unsoft.measure.unique_share`. Raises ValueError if the weight at ``clone`` is 0:
    such clones take nothing in any number, so the share of 1 would say nothing about the mechanism.

    >>> hijack_share("softmax", [1, 50])                 # 20/21, 20/70
    tensor([0.9524, 0.2857], dtype=torch.float64)
    >>> hijack_share("relu2", 50)                        # (1 + log 20)^2 against 50 * 1^2
    tensor(0.2420, dtype=torch.float64)
    """
    m, u, c = _read(clones, unique, clone)
    return _share(*_log_weights(mechanism, m, u, c))


def magnitude_hijack(
    clones: Numbers,
    *,
    unique: Numbers = UNIQUE,
    clone: Numbers = CLONE,
    base: Mechanism = "softmax",
    on: str = "values",
    gate: str = "sigmoid",
    slope: float = 1.0,
    offset: float = 0.0,
    eps: float = 0.1,
) -> MagnitudeHijack:
    """Return the factors and the share of a unique key if every key is gated by its magnitude weight.

    ``gate="sigmoid"`` is g(w) = sigmoid(slope w + offset), ``gate="weight"`` is the weight itself, as in the
    example of Rosić 2026. ``on="values"`` multiplies the values, so the row loses what the gate removes;
    ``on="mass"`` multiplies the weights before they are normalised. The share is the same; the output is not.

    A sigmoid gate only delays the hijack: as m grows, g(w_clone) -> sigmoid(offset), a constant, so the
    clones win again once m exceeds exp(u - c) g(w_unique) / sigmoid(offset). Only a gate that falls as 1/m
    stops it.

    >>> magnitude_hijack(50, gate="weight", eps=0.0).share              # 20/21, as if there were one clone
    tensor(0.9524, dtype=torch.float64)
    >>> magnitude_hijack(50, gate="sigmoid").share                      # softmax alone: 0.2857
    tensor(0.3609, dtype=torch.float64)
    """
    one_of("magnitude_hijack", "on", on, ("values", "mass"))
    one_of("magnitude_hijack", "gate", gate, ("sigmoid", "weight"))
    m, u, c = _read(clones, unique, clone)
    ridge = read_at_least("eps", eps, 0.0)
    gates = 1 / (1 + ridge), 1 / (m + ridge)  # of the unique key and of each clone
    if gate == "sigmoid":
        a, b = read_numbers("slope", slope), read_numbers("offset", offset)
        gates = torch.sigmoid(a * gates[0] + b), torch.sigmoid(a * gates[1] + b)
    log_unique, log_clones = _log_weights(base, m, u, c)
    gated = log_unique + gates[0].log(), log_clones + gates[1].log()
    total = torch.logaddexp(*(gated if on == "mass" else (log_unique, log_clones)))
    return MagnitudeHijack((gated[0] - total).exp(), (gated[1] - total).exp(), _share(*gated))


def density_hijack(
    clones: Numbers,
    *,
    p: Numbers = 0.5,
    unique: Numbers = UNIQUE,
    clone: Numbers = CLONE,
    base: Mechanism = "softmax",
) -> Tensor:
    """Return the share of a unique key if every key is divided by its density to the power ``p``.

    m clones count as m^(1 - p), at any m: p = 1 ends the hijack, p = 0 is the mechanism ``base`` alone.

    >>> density_hijack([50, 1000], p=1.0)                               # 20/21, as if there were one clone
    tensor([0.9524, 0.9524], dtype=torch.float64)
    >>> density_hijack(50, p=0.0)                                       # 20/70
    tensor(0.2857, dtype=torch.float64)
    """
    m, u, c = _read(clones, unique, clone)
    power = read_at_least("p", p, 0.0)
    if bool((power > 1).any()):
        raise ValueError(f"p: expected numbers between 0 and 1, not {float(power.max()):g}")
    log_unique, log_clones = _log_weights(base, m, u, c)
    return _share(log_unique, log_clones - power * m.log())


def _read(clones: Numbers, unique: Numbers, clone: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    m = read_at_least("clones", clones, 1.0)
    u, c = read_numbers("unique", unique), read_numbers("clone", clone)
    broadcast: tuple[Tensor, Tensor, Tensor] = torch.broadcast_tensors(m, u, c)
    return broadcast


def _log_weights(mechanism: Mechanism, m: Tensor, u: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return log|f(u)| and log(m |f(c)|), which is finite."""
    formula = formula_of(mechanism)
    weight = Weight(formula, n=m + 1)
    log_clone = weight.log_size(c)
    weightless = c[log_clone == -math.inf]
    if weightless.numel():
        raise ValueError(
            f"clone: the weight {formula.weight} is 0 at the logit {weightless[0]:g}, so clones take nothing"
            " in any number; give a logit at which the weight is not 0, such as clone=1.0 for most formulas"
        )
    return weight.log_size(u), log_clone + m.log()


def _share(log_unique: Tensor, log_clones: Tensor) -> Tensor:
    return torch.sigmoid(log_unique - log_clones)
