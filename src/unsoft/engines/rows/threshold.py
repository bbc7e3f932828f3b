"""Rules with a threshold per row: t is such that the masses of a row sum to 1.

    sum over visible j of mass(s_j, t) = 1      a_j = weight(s_j, t)      m = max over visible j of s_j

>>> sparsemax = Threshold("max(s - m - t, 0)", low=-1)
>>> sparsemax.row(torch.tensor([3.0, 2.5, 0.0]))
tensor([0.7500, 0.2500, 0.0000])

Logits are relative to the peak m, so that t stays near 0 whatever their size. Gradients are exact: t is
a function of the logits, by dt/ds_j = -mass_s(s_j, t) / sum mass_t.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.native.codegen import threshold_source
from unsoft.engines.native.direct import observed
from unsoft.engines.rows.rule import RowRule
from unsoft.formula import Expr, derivative, evaluate, parse
from unsoft.formula.arguments import read_params
from unsoft.formula.evaluation import evaluate_all

_PARTS = ("weight", "mass", "low", "high", "straight")
_MOST_STEPS = 60
_JETS = 2
"""Differentiable steps at the solution: one makes the first derivative exact, two the third."""


class Threshold(RowRule):
    """A rule as formula text in s, m, t, n, i and the parameters.

    ``mass`` must decrease with t and defaults to ``weight``. The solution is between ``low`` and ``high``,
    expressions of n, i and parameters. ``straight`` is an increasing function of the total z that is closer
    to a straight line in t than z itself, which saves Newton steps: log(z) for exponentials, sqrt(z) for
    squares.
    """

    kind = "threshold"

    def __init__(
        self,
        weight: str | Expr,
        mass: str | Expr | None = None,
        *,
        low: str | float | Expr = -1,
        high: str | float | Expr = 0,
        straight: str | Expr = "z",
        params: Mapping[str, float] | None = None,
    ) -> None:
        self.params = MappingProxyType(read_params(params))
        self.weight = self._part("weight", weight, "smtni")
        self.mass = self.weight if mass is None else self._part("mass", mass, "smtni")
        self.low, self.high = self._part("low", low, "ni"), self._part("high", high, "ni")
        self.straight = self._part("straight", straight, "zni")
        symbols = (getattr(self, name).symbols for name in _PARTS)
        self.uses = frozenset[str]().union(*symbols) & {"n"}

    def _part(self, name: str, text: object, symbols: str) -> Expr:
        return parse(str(text), {*symbols, *self.params}, argument=name)

    def text(self) -> str:
        parts = {name: str(getattr(self, name)) for name in _PARTS}
        return json.dumps(parts | {"params": dict(self.params)}, sort_keys=True)

    @classmethod
    def read(cls, text: str) -> Threshold:
        return cls(**json.loads(text))

    def row(self, logits: Tensor, **values: Tensor | float) -> Tensor:
        """Return the weights of a row of visible keys; ``values``: parameters other than their defaults.

        >>> entmax = Threshold("max((s - m)/2 - t, 0)**2", straight="sqrt(z)")
        >>> entmax.row(torch.tensor([1.0, 1.0, -9.0]))
        tensor([0.5000, 0.5000, 0.0000])
        """
        count = logits.shape[-1]
        numbers: dict[str, Any] = {**self.params, "n": count, "i": count - 1, **values}
        symbols = {name: torch.as_tensor(x, dtype=logits.dtype) for name, x in numbers.items()}
        return self.weights(logits, torch.ones_like(logits, dtype=torch.bool), symbols)

    def weights(self, logits: Tensor, visible: Tensor, symbols: Mapping[str, Tensor]) -> Tensor:
        if logits.shape[-1] == 0:
            return logits
        some = visible.any(-1, keepdim=True)
        peak = logits.detach().masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
        peak = torch.where(some, peak, 0.0)
        symbols = {**symbols, "m": peak, "s": torch.where(visible, logits, peak)}
        detached = {name: x.detach() for name, x in symbols.items()}
        with torch.no_grad():
            t = self._solved(detached, visible, some)
        for _ in range(_JETS):
            total, slope = self._total(symbols, visible, t)
            t = t - torch.where(some, (total - 1) / torch.where(some, slope, 1.0), 0.0)
        return torch.where(visible, evaluate(self.weight, symbols | {"t": t}), 0.0)

    @cached_property
    def straight_slope(self) -> Expr:
        return derivative(self.straight, "z")

    @cached_property
    def _mass_slope(self) -> Expr:
        return derivative(self.mass, "t")

    def _total(self, symbols: Mapping[str, Tensor], visible: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of masses and its derivative by t."""
        sums = evaluate_all({"mass": self.mass, "slope": self._mass_slope}, {**symbols, "t": t})
        total, slope = (torch.where(visible, x, 0.0).sum(-1, keepdim=True) for x in sums.values())
        return total, slope

    def _solved(self, symbols: Mapping[str, Tensor], visible: Tensor, some: Tensor) -> Tensor:
        """Return t of every row: Newton's method on the straightened total, inside a bracket that shrinks."""
        row = {name: x for name, x in symbols.items() if name not in ("s", "m")} | {
            "one": torch.ones_like(symbols["m"])
        }
        low, high = (evaluate(part, row) + 0 * row["one"] for part in (self.low, self.high))
        one = evaluate(self.straight, row | {"z": row["one"]})
        t, done = low, ~some
        for _ in range(_MOST_STEPS):
            total, slope = self._total(symbols, visible, t)
            above = total >= 1
            low, high = torch.where(above, t, low), torch.where(above, high, t)
            line = evaluate_all({"y": self.straight, "by": self.straight_slope}, row | {"z": total})
            step = t - (line["y"] - one) / (line["by"] * slope)
            step = torch.where((step >= low) & (step <= high), step, (low + high) / 2)
            # A row that has converged stays as it is: further steps for other rows must not change it.
            moved, t = (step - t).abs(), torch.where(done, t, step)
            done = done | ~(moved > 2 * torch.finfo(t.dtype).eps)
            if not observed() and bool(done.all()):
                break
        return t

    def source(self) -> str:
        parts = {name: getattr(self, name) for name in (*_PARTS, "straight_slope")}
        return threshold_source(parts, sorted(self.params))
