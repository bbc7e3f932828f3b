"""S(beta, gamma) of any mechanism, the measure of document 001: how evenly a long row spreads its weight."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch import Tensor

from unsoft.formula import Formula
from unsoft.theory.arguments import Numbers, read_logits
from unsoft.theory.closed_forms import CLOSED_FORMS
from unsoft.theory.moments import Weight, limit_spread, ratio

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
    I); the row's normaliser cancels. A name ("exp", "softmax", "identity", "relu", "relu2", "cog", "sinh",
    "softmax1", "l2") uses its closed form, "sigmoid" and every :class:`~unsoft.Formula` numeric integration
    to about 1e-10.

    beta and gamma broadcast; the result is a float64 tensor. gamma = 0 gives the limit gamma -> 0: 1 if the
    weight at beta is not 0, 0 if it is 0 all around, and what lies between at a corner (sqrt(2/pi) for
    "identity" at beta = 0).

    n
        Number of keys, for formulas that depend on it in more than their scale, such as sigmoid's -log(n).
        The row itself stays infinitely long.
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


def formula_of(mechanism: str | Formula) -> Formula:
    """The formula to integrate. Weights by name are written here once more, apart from the mechanisms."""
    if isinstance(mechanism, Formula):
        return mechanism
    if not isinstance(mechanism, str):
        raise TypeError(f"mechanism: expected a name or a Formula, not {type(mechanism).__name__}")
    if mechanism not in WEIGHTS:
        near = difflib.get_close_matches(mechanism.lower(), WEIGHTS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"mechanism: the theory knows no {mechanism!r}{hint}"
            f" (known: {', '.join(sorted(WEIGHTS))}; anything else as a Formula)"
        )
    return Formula(WEIGHTS[mechanism])


WEIGHTS = {  # up to the factors that cancel
    **dict.fromkeys(("exp", "softmax", "softmax1", "l2"), "exp(s)"),
    **dict.fromkeys(("identity", "linear-identity"), "s"),
    "relu": "max(s, 0)",
    "relu2": "max(s, 0)**2",
    "cog": "sign(s)*exp(abs(s))",
    "sinh": "(exp(s) - exp(-s))/2",
    "sigmoid": "sigmoid(s - log(n))",
}


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
