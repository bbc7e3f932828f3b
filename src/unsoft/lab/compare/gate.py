"""The gate of magnitude with parameters found by a fit, in place of those it happens to start with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from unsoft.lab.compare.subject import WIDTH, Subject
from unsoft.modules.build import mechanism
from unsoft.modules.module import Mechanism

FITTED_TO = 50
_CROWDS = (2, 5, 10, 20, FITTED_TO)
_NEAR, _APART = 2 * 0.03**2, 2.0
"""Squared distances by coordinate: of near-clones with noise 0.03, and of standard normal keys."""
_OPEN = 0.5
"""The least that the gate of a key without look-alikes may be: closing everything is no answer."""


class Gate(NamedTuple):
    """sigmoid(beta w + gamma) of the weight w that a key has in the geometry; t is the scale of distances."""

    beta: float
    gamma: float
    t: float
    eps: float = 0.1

    def of(self, weight: float) -> float:
        return 1 / (1 + math.exp(-(self.beta * weight + self.gamma)))


@dataclass(frozen=True)
class GatedSubject(Subject):
    """A mechanism that gates its keys, with given parameters; ``where`` is an option of magnitude."""

    gate: Gate = Gate(1.0, 0.0, 1.0)
    where: str | None = None

    def module(self, length: int, heads: int = 1, width: int = WIDTH) -> Mechanism:
        options: dict[str, Any] = {} if self.where is None else {"where": self.where}
        layer = mechanism(self.mechanism, heads=heads, head_dim=width, **options)
        layer.set_key_gate(beta=self.gate.beta, gamma=self.gate.gamma, t=self.gate.t)
        return layer


@cache
def fitted_gate() -> Gate:
    """beta, gamma and t by which crowds count as one and distinct keys as many, as far as a sigmoid allows.

    What m keys count as is m g(w_m) / g(w_1). For m = 2 to 50 near-clones, with noise of 0.03 in every
    coordinate, it should be 1; for as many keys as far apart as random ones are, it should be m. The
    squares of the logarithmic errors are made small over a grid of the three, under the condition that a
    key without look-alikes keeps a gate of at least a half.

    >>> gate = fitted_gate()
    >>> 0.49 < gate.of(1 / 1.1), gate.of(1 / 50.1) < 0.05
    (True, True)
    """
    sizes = torch.tensor(_CROWDS, dtype=torch.float64)
    t, beta, gamma = torch.meshgrid(
        torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64),
        torch.linspace(1, 20, 96, dtype=torch.float64),
        torch.linspace(-12, 2, 71, dtype=torch.float64),
        indexing="ij",
    )
    eps = Gate(0, 0, 0).eps
    alone = logsigmoid(beta / (1 + eps) + gamma)
    errors = torch.where(alone.exp() < _OPEN, torch.inf, 0.0)
    for distance, wanted in ((_NEAR, torch.zeros_like(sizes)), (_APART, sizes.log())):
        alike = torch.exp(-t * distance)[..., None]
        weights = 1 / (1 + eps + (sizes - 1) * alike)
        gates = logsigmoid(beta[..., None] * weights + gamma[..., None])
        errors = errors + (sizes.log() + gates - alone[..., None] - wanted).square().mean(-1)
    best = errors.argmin()
    return Gate(*(float(x.flatten()[best]) for x in (beta, gamma, t)))
