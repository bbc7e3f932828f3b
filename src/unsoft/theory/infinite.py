"""S(beta, gamma) of any mechanism, the measure of Su 2023: how evenly a long row spreads its weight.

Also its limits in gamma and its minimum: how far a mechanism can focus.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.theory.arguments import Mechanism, Numbers, Params, read_dim, read_logits, read_numbers
from unsoft.theory.closed_forms import CLOSED_FORMS
from unsoft.theory.weight import Weight, formula_of, limit_spread

IDENTITY_FLOOR = math.sqrt(2 / math.pi)
"""The plain logit never gets below this, 0.798, for any beta and gamma."""
RELU_FLOOR = 1 / math.sqrt(math.pi)
"""relu never gets below this, 0.564, unless beta < 0."""
RELU2_FLOOR = 1 / math.sqrt(6)
"""relu2 never gets below this, 0.408, unless beta < 0."""

_FLOORS = dict.fromkeys(("identity", "linear-identity"), IDENTITY_FLOOR)
_FLOORS |= {"relu": RELU_FLOOR, "relu2": RELU2_FLOOR}
"""S as gamma -> infinity of the closed forms for which that is not 0."""
_WIDEST, _VANISHING = 1e4, 1e-7
_LEAST_SPREAD = 1e-100  # used for 0 in the closed forms


class Limits(NamedTuple):
    """S as gamma -> 0 and gamma -> infinity, and the smallest value that S reaches or approaches."""

    narrow: float
    wide: float
    infimum: float


class Minimum(NamedTuple):
    """The smallest S in a range, and its gamma."""

    sparsity: float
    gamma: float


def sparsity(
    mechanism: Mechanism,
    beta: Numbers,
    gamma: Numbers,
    *,
    n: float | None = None,
    params: Params = None,
    dim: int | None = None,
) -> Tensor:
    """Return S = E|a| / sqrt(E a^2) of a row of infinitely many keys whose logits are N(beta, gamma^2).

    1 is perfectly even, 0 is all on one key. beta = q . mu and gamma = sigma |q| for keys k ~ N(mu, sigma^2
    I); the row's normaliser cancels. A mechanism is a name ("tanh", "polynomial(3)", "logn+cog") or a
    :class:`~unsoft.Formula`. "exp", "softmax", "identity", "relu", "relu2", "cog", "sinh", "softmax1" and
    "l2" use their closed forms, everything else numeric integration to about 1e-10.

    beta and gamma broadcast; the result is a float64 tensor. gamma = 0 gives the limit gamma -> 0: 1 if the
    weight at beta is not 0, 0 if it is 0 all around, and what lies between at a corner (sqrt(2/pi) for
    "identity" at beta = 0).

    n
        Number of keys in the formula, needed if it depends on n in more than its scale, such as sigmoid's
        -log(n) or the factor of "logn+cog". The row itself stays infinitely long: S is that of a row that
        grows while n stays. A factor such as the 1/n of "tanh" cancels and needs no n.
    params
        Values of a formula's parameters other than their defaults.
    dim
        With it, keys lie on a sphere of that many dimensions (3 or more) instead of being Gaussian: the logit
        is beta + gamma sqrt(dim) u, u the first coordinate of a random unit vector. The Gaussian is the limit
        of many dimensions.

    >>> from unsoft import Formula
    >>> sparsity("softmax", 0.0, [0.5, 1.0, 2.0])
    tensor([0.8825, 0.6065, 0.1353], dtype=torch.float64)
    >>> sparsity(Formula("exp(s - m)", "exp(s - m)", "s"), 0.0, [0.5, 1.0, 2.0])
    tensor([0.8825, 0.6065, 0.1353], dtype=torch.float64)
    """
    mean, spread = read_logits(beta, gamma)
    form = CLOSED_FORMS.get(mechanism) if isinstance(mechanism, str) and dim is None else None
    if form is None:
        return _numeric(Weight(formula_of(mechanism), n=n, params=params), mean, spread, read_dim(dim))
    if params:
        raise ValueError(f"params: the closed form of {mechanism!r} has no parameters; give a Formula")
    return form(mean, spread.clamp(min=_LEAST_SPREAD))


def _numeric(weight: Weight, beta: Tensor, gamma: Tensor, dim: int | None) -> Tensor:
    def at(spread: Tensor) -> Tensor:
        first, second = weight.log_moments(beta, spread, (1, 2), dim)
        return torch.where(first == -math.inf, 0.0, torch.exp(first - second / 2))

    if not beta.numel():
        return torch.zeros_like(beta)
    resting = gamma == 0
    small = limit_spread(beta)
    values = at(torch.where(resting, small, gamma))
    # S is S(0) + c gamma + O(gamma^2) at a corner of the formula, so this extrapolation removes the c.
    return torch.where(resting, 2 * values - at(2 * small), values) if resting.any() else values


def limits(mechanism: Mechanism, beta: float, *, n: float | None = None, params: Params = None) -> Limits:
    """Return the limits in gamma at a fixed beta: in closed form where S is, else numerically to about 1e-6.

    ``n`` and ``params`` are those of :func:`sparsity`.

    softmax, cog and sinh focus without limit as the logits spread. identity, relu and relu2 depend on beta /
    gamma alone: spreading the logits only moves beta / gamma towards 0, where S has a floor, unless beta < 0
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
    narrow, wide = _settled(narrow), _wide(partial(sparsity, mechanism, shift, n=n, params=params), shift)
    if 0.0 in (narrow, wide):
        return Limits(narrow, wide, 0.0)
    between = minimum(mechanism, shift, gamma=(1e-3, 100.0), n=n, params=params).sparsity
    return Limits(narrow, wide, min(narrow, wide, between))


def _wide(s: Callable[[float], Tensor], beta: float) -> float:
    """Return the limit of S(gamma), which it approaches as 1/gamma unless it falls to 0."""
    gamma, values = 10.0, [1.0]
    while gamma < _WIDEST * max(1.0, abs(beta)):
        gamma *= 4
        values.append(float(s(gamma)))
        if values[-1] < _VANISHING:
            return 0.0
    return _settled((4 * values[-1] - values[-2]) / 3)


def _settled(value: float) -> float:
    """Return a numerical limit, rounded to the digits that are known."""
    return 0.0 if value < _VANISHING else round(min(value, 1.0), 7)


def can_focus(mechanism: Mechanism, beta: float, *, n: float | None = None, params: Params = None) -> bool:
    """Return True if S can come arbitrarily near 0 at this beta. For relu2 (Su 2023): only if beta < 0.

    >>> [can_focus("relu2", beta) for beta in (-0.1, 0.0, 0.1)]
    [True, False, False]
    >>> can_focus("swishmax", 0.0), can_focus("tanh", 0.0), can_focus("logn+cog", 0.0, n=1024)
    (True, False, True)
    """
    return limits(mechanism, beta, n=n, params=params).infimum == 0.0


def minimum(
    mechanism: Mechanism,
    beta: float,
    *,
    gamma: tuple[float, float] = (1e-3, 30.0),
    n: float | None = None,
    params: Params = None,
) -> Minimum:
    """Return the smallest S for gamma in a range, on a grid of 64 that is refined three times.

    >>> lowest = minimum("tanh", 0.0)
    >>> round(lowest.sparsity, 4), round(lowest.gamma, 3)
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
