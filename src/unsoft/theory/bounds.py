"""How far a mechanism can focus at all: limits of S in gamma, and its minimum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from unsoft.formula import Formula
from unsoft.theory.arguments import read_numbers
from unsoft.theory.closed_forms import CLOSED_FORMS
from unsoft.theory.infinite import sparsity

IDENTITY_FLOOR = math.sqrt(2 / math.pi)
"""The plain logit never gets below this, 0.798, for any beta and gamma."""
RELU_FLOOR = 1 / math.sqrt(math.pi)
"""relu never gets below this, 0.564, unless beta < 0."""
RELU2_FLOOR = 1 / math.sqrt(6)
"""relu2 never gets below this, 0.408, unless beta < 0."""

_FLOORS = {
    "identity": IDENTITY_FLOOR,
    "linear-identity": IDENTITY_FLOOR,
    "relu": RELU_FLOOR,
    "relu2": RELU2_FLOOR,
}
"""S as gamma -> infinity of the closed forms for which that is not 0."""
_WIDEST, _VANISHING = 1e4, 1e-7


class Limits(NamedTuple):
    """S as gamma -> 0 and gamma -> infinity, and the smallest value that S reaches or approaches."""

    narrow: float
    wide: float
    infimum: float


class Minimum(NamedTuple):
    """The smallest S found, and the gamma where it lies."""

    sparsity: float
    gamma: float


def limits(
    mechanism: str | Formula,
    beta: float,
    *,
    n: float | None = None,
    params: Mapping[str, float] | None = None,
) -> Limits:
    """Limits in gamma at a fixed beta: in closed form where S is, else found numerically, to about 1e-6.

    ``n`` and ``params`` are those of :func:`sparsity`.

    softmax, cog and sinh focus without limit as the logits spread. identity, relu and relu2 depend on beta /
    gamma alone: spreading the logits only brings beta / gamma = 0 nearer, which is a floor, unless beta < 0
    makes positive weights rare (relu, relu2).

    >>> limits("identity", 1.0)
    Limits(narrow=1.0, wide=0.797..., infimum=0.797...)
    >>> limits("relu2", 1.0).infimum, limits("relu2", -1.0).infimum
    (0.408..., 0.0)
    >>> limits("tanh", 1.0).wide                      # every weight saturates at +-1
    1.0
    """
    shift = float(read_numbers("beta", beta))
    narrow = float(sparsity(mechanism, shift, 0.0, n=n, params=params))
    if isinstance(mechanism, str) and mechanism in CLOSED_FORMS:
        wide = _FLOORS.get(mechanism, 0.0)
        return Limits(narrow, wide, min(narrow, wide))
    narrow, wide = _settled(narrow), _wide(mechanism, shift, n, params)
    if 0.0 in (narrow, wide):
        return Limits(narrow, wide, 0.0)
    between = minimum(mechanism, shift, gamma=(1e-3, 100.0), n=n, params=params).sparsity
    return Limits(narrow, wide, min(narrow, wide, between))


def _wide(
    mechanism: str | Formula, beta: float, n: float | None, params: Mapping[str, float] | None
) -> float:
    """The limit of ever wider spreads, which S approaches as 1/gamma unless it falls to 0."""
    gamma, values = 10.0, [1.0]
    while gamma < _WIDEST * max(1.0, abs(beta)):
        gamma *= 4
        values.append(float(sparsity(mechanism, beta, gamma, n=n, params=params)))
        if values[-1] < _VANISHING:
            return 0.0
    return _settled((4 * values[-1] - values[-2]) / 3)


def _settled(value: float) -> float:
    """A limit found numerically, without the digits that are not known."""
    return 0.0 if value < _VANISHING else round(min(value, 1.0), 7)


def can_focus(
    mechanism: str | Formula,
    beta: float,
    *,
    n: float | None = None,
    params: Mapping[str, float] | None = None,
) -> bool:
    """Can S come arbitrarily near 0 at this beta? For relu2, the question of Su 2023: only if beta < 0.

    >>> [can_focus("relu2", beta) for beta in (-0.1, 0.0, 0.1)]
    [True, False, False]
    >>> can_focus("swishmax", 0.0), can_focus("tanh", 0.0), can_focus("logn+cog", 0.0, n=1024)
    (True, False, True)
    """
    return limits(mechanism, beta, n=n, params=params).infimum == 0.0


def minimum(
    mechanism: str | Formula,
    beta: float,
    *,
    gamma: tuple[float, float] = (1e-3, 30.0),
    n: float | None = None,
    params: Mapping[str, float] | None = None,
) -> Minimum:
    """The smallest S for gamma in a range: on a grid of 64 that closes in three times on its lowest point.

    >>> found = minimum(Formula("tanh(s)"), 0.0)
    >>> round(found.sparsity, 4), round(found.gamma, 3)
    (0.7979, 0.001)
    """
    low, high = (float(x) for x in read_numbers("gamma", gamma))
    if not 0 < low < high:
        raise ValueError(f"gamma: expected a range of two rising positive numbers, not {gamma!r}")
    for _ in range(4):
        grid = torch.logspace(math.log10(low), math.log10(high), 64, dtype=torch.float64).clamp(low, high)
        values = sparsity(mechanism, beta, grid, n=n, params=params)
        lowest = int(values.argmin())
        low, high = float(grid[max(lowest - 1, 0)]), float(grid[min(lowest + 1, 63)])
    return Minimum(float(values[lowest]), float(grid[lowest]))
