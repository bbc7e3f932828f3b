"""Moments of the weights of any formula, for logits of mean beta and spread gamma."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from unsoft.formula import Formula
from unsoft.formula.signed_log import SignedLog
from unsoft.theory.arguments import Numbers, read_at_least
from unsoft.theory.kinks import kinks
from unsoft.theory.quadrature import log_moments
from unsoft.theory.signed_log import signed_log

_AT_ONCE = 256  # points, each with some thousand nodes
_PROBES = torch.tensor([-7.3, -1.1, -0.2, 0.3, 1.7, 8.9], dtype=torch.float64)


class Weight:
    """The weight of a formula as a function of the logit alone, up to a constant factor.

    The row peak m is 0, since it cancels; ``n`` is needed if the formula depends on the number of keys in
    more than its scale.

    >>> Weight(Formula("max(s, 0)/n")).signed_log(torch.tensor([2.0, -3.0])).plain
    tensor([2., 0.], dtype=torch.float64)
    """

    def __init__(
        self, formula: Formula, *, n: Numbers | None = None, params: Mapping[str, float] | None = None
    ) -> None:
        if unknown := set(params or {}) - formula.params.keys():
            known = ", ".join(formula.params) or "none"
            raise ValueError(
                f"params: the formula has no {', '.join(sorted(unknown))}; its parameters: {known}"
            )
        if positions := formula.weight.symbols & {"i", "j"}:
            raise ValueError(
                f"formula: the weight depends on the position ({', '.join(sorted(positions))}), so its keys"
                " do not share one distribution and S(beta, gamma) is not defined"
            )
        self.expr = formula.weight
        self.env: dict[str, float | Tensor] = {"m": 0.0, **formula.params, **(params or {})}
        self.keys = self.env["n"] = self._count(n)

    def _count(self, n: Numbers | None) -> Tensor:
        if n is not None:
            return read_at_least("n", n, 1.0)
        few, many = (
            signed_log(self.expr, {"s": _PROBES, **self.env, "n": count}).log for count in (2.0, 1000.0)
        )
        change = (many - few)[few.isfinite() & many.isfinite()]
        if len(change) and change.max() - change.min() > 1e-9:
            raise ValueError(
                "n: the weights of this formula depend on the number of visible keys; give n, such as 1024"
            )
        return torch.ones((), dtype=torch.float64)

    def signed_log(self, logits: Tensor) -> SignedLog:
        """Sign and logarithm of the weight at each logit."""
        return signed_log(self.expr, {"s": logits.double(), **self.env})

    def log_size(self, logits: Tensor) -> Tensor:
        """log|weight|, expanded to the shape of the logits."""
        return self.signed_log(logits).log.expand(logits.shape)

    def log_moments(self, beta: Tensor, gamma: Tensor, powers: tuple[int, ...], dim: int | None) -> Tensor:
        """log E|weight|^p, the powers in the first dimension; for one number of keys."""
        if self.keys.ndim:
            raise ValueError(
                f"n: expected one number of keys, not a tensor of shape {tuple(self.keys.shape)}"
            )
        breaks = kinks(self.expr, self.env)
        points = zip(beta.flatten().split(_AT_ONCE), gamma.flatten().split(_AT_ONCE), strict=True)
        found = [log_moments(self.log_size, *point, powers, breaks, dim) for point in points]
        return torch.cat(found, dim=1).reshape(len(powers), *beta.shape)


def limit_spread(beta: Tensor) -> Tensor:
    """A gamma small enough to stand for 0 in two steps (see :func:`sparsity`), large enough for float64."""
    return 1e-5 * beta.abs().clamp(min=1.0)


def ratio(first: Tensor, second: Tensor) -> Tensor:
    """S from the logarithms of the first two moments; 0 where every weight is 0."""
    return torch.where(first == -math.inf, 0.0, torch.exp(first - second / 2))
