"""S(beta, gamma) of any mechanism, the measure of Su 2023: how evenly a long row spreads its weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unsoft.formula import Formula
from unsoft.theory.arguments import Numbers, read_logits
from unsoft.theory.closed_forms import CLOSED_FORMS
from unsoft.theory.moments import Weight, limit_spread, ratio
from unsoft.theory.named import formula_of

_LEAST_SPREAD = 1e-100  # stands for 0 in the closed forms


def sparsity(
    mechanism: str | Formula,
    beta: Numbers,
    gamma: Numbers,
    *,
    n: float | None = None,
    params: Mapping[str, float] | None = None,
    dim: int | None = None,
) -> Tensor:
    """S = E|a| / sqrt(E a^2) of a row of infinitely many keys whose logits are N(beta, gamma^2).

    1 is perfectly even, 0 is all on one key. beta = q . mu and gamma = sigma |q| for keys k ~ N(mu, sigma^2
    I); the row's normaliser cancels. A mechanism is a name ("tanh", "polynomial(3)", "logn+cog") or a
    :class:`~unsoft.Formula`. "exp", "softmax", "identity", "relu", "relu2", "cog", "sinh", "softmax1" and
    "l2" use their closed forms, everything else numeric integration to about 1e-10.

    beta and gamma broadcast; the result is a float64 tensor. gamma = 0 gives the limit gamma -> 0: 1 if the
    weight at beta is not 0, 0 if it is 0 all around, and what lies between at a corner (sqrt(2/pi) for
    "identity" at beta = 0).

    n
        Number of keys that the formula is told, needed if it depends on n in more than its scale, such as
        sigmoid's -log(n) or the factor of "logn+cog". The row itself stays infinitely long: S is that of a
        row that grows while n stays. A factor such as the 1/n of "tanh" cancels and needs no n.
    params
        Values of a formula's parameters other than their defaults.
    dim
        With it, keys lie on a sphere of that many dimensions (3 or more) instead of being Gaussian: the logit
        is beta + gamma sqrt(dim) u, u the first coordinate of a random unit vector. The Gaussian is the limit
        of many dimensions.

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
        return ratio(*weight.log_moments(beta, spread, (1, 2), dim))

    if not beta.numel():
        return torch.zeros_like(beta)
    resting = gamma == 0
    small = limit_spread(beta)
    found = at(torch.where(resting, small, gamma))
    # S is S(0) + c gamma + O(gamma^2) at a corner of the formula, so this removes the c.
    return torch.where(resting, 2 * found - at(2 * small), found) if resting.any() else found


def read_dim(dim: int | None) -> int | None:
    if dim is None:
        return None
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 3:
        raise ValueError(f"dim: expected a whole number of dimensions from 3 on, or None, not {dim!r}")
    return dim
