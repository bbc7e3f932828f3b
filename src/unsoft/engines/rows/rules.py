"""Rules that turn the logits of a row into weights, in torch and in C++: stick-breaking, and thresholds that
are solved so that a row sums to 1. Their specification is :func:`dense_rows`, on whole matrices of logits."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unsoft.engines.call import Call
from unsoft.engines.dense import dense_logits, weighted_values
from unsoft.engines.native.codegen import threshold_source
from unsoft.engines.native.direct import observed
from unsoft.formula import Expr, derivative, evaluate, parse
from unsoft.formula.arguments import NO_SYMBOLS, read_params
from unsoft.formula.evaluation import evaluate_all

_PARTS = ("weight", "mass", "low", "high", "straight")
_MOST_STEPS = 60
_JETS = 2
"""Differentiable steps at the solution: one makes the first derivative exact, two the third."""
_readers: dict[str, Callable[[str], RowRule]] = {}


class RowRule(ABC):
    """One rule: all that the engines need to know about a row-coupled mechanism."""

    kind: str
    """Name of this kind of rules, at the beginning of their keys."""
    params: Mapping[str, float]
    """Names and default values of parameters, one value per head, sorted by name."""
    uses: frozenset[str]
    """{"n"} if it uses the number of visible keys; the row i is always there."""
    fields: Mapping[str, str] = MappingProxyType({})
    symbols = NO_SYMBOLS

    def __init_subclass__(cls) -> None:
        _readers[cls.kind] = cls.read

    @property
    def key(self) -> str:
        """Everything that decides the numbers, as one line of text."""
        return f"{self.kind} {self.text()}"

    @staticmethod
    def from_key(key: str) -> RowRule:
        """Return the rule of a :attr:`key`."""
        kind, _, text = key.partition(" ")
        return _readers[kind](text)

    def __reduce__(self) -> tuple[Callable[[str], RowRule], tuple[str]]:
        return RowRule.from_key, (self.key,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowRule) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def text(self) -> str:
        """Return what distinguishes it from other rules of its kind: the arguments of its class, as JSON."""
        return "{}"

    @classmethod
    def read(cls, text: str) -> RowRule:
        """Return the rule of a :meth:`text`."""
        return cls(**json.loads(text))

    @abstractmethod
    def weights(self, logits: Tensor, visible: Tensor, symbols: Mapping[str, Tensor]) -> Tensor:
        """Return weights (B, H, L, S) from finite logits and bool ``visible`` of that shape; any value where
        hidden.

        ``symbols``: i, n if it :attr:`uses` it, and the parameters, each broadcastable to the logits.
        """

    @abstractmethod
    def source(self) -> str:
        """Return C++ that defines ``unsoft_mechanism``; see engines/native/kernel/rows/panel.h."""


class Sticks(RowRule):
    """Stick-breaking: a_j = sigmoid(s_j) * product over later keys of (1 - sigmoid(s)).

    Every key, from the last to the first, takes a share of what is left.

    >>> Sticks().weights(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), {})     # sigmoid(0) = 1/2
    tensor([[0.1250, 0.2500, 0.5000]])
    """

    kind = "sticks"
    params: Mapping[str, float] = MappingProxyType({})
    uses = frozenset[str]()

    def weights(self, logits: Tensor, visible: Tensor, symbols: Mapping[str, Tensor]) -> Tensor:
        logits = torch.where(visible, logits, 0.0)
        left = torch.where(visible, logsigmoid(-logits), 0.0)
        # In logarithms: the product of what later keys leave would underflow after three of them with s = 50.
        later = left.flip(-1).cumsum(-1).flip(-1) - left
        return torch.where(visible, (logsigmoid(logits) + later).exp(), 0.0)

    def source(self) -> str:
        return '#include "rows/sticks.h"\n'


class Threshold(RowRule):
    """A rule with a threshold t per row, such that the masses of the row sum to 1.

        sum over visible j of mass(s_j, t) = 1      a_j = weight(s_j, t)      m = max over visible j of s_j

    >>> sparsemax = Threshold("max(s - m - t, 0)", low=-1)
    >>> sparsemax.row(torch.tensor([3.0, 2.5, 0.0]))
    tensor([0.7500, 0.2500, 0.0000])

    Logits are relative to the peak m, so that t stays near 0 whatever their size. Gradients are exact: t is
    a function of the logits, by dt/ds_j = -mass_s(s_j, t) / sum mass_t.

    The parts are formula text in s, m, t, n, i and the parameters.

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
            # Masses fall with t: a total of at least 1 puts the solution at t or right of it.
            above = total >= 1
            low, high = torch.where(above, t, low), torch.where(above, high, t)
            line = evaluate_all({"y": self.straight, "by": self.straight_slope}, row | {"z": total})
            step = t - (line["y"] - one) / (line["by"] * slope)
            # Newton may leave the bracket, or be NaN where all masses and the slope are 0: then bisect.
            step = torch.where((step >= low) & (step <= high), step, (low + high) / 2)
            # A row that has converged stays as it is: further steps for other rows must not change it.
            moved, t = (step - t).abs(), torch.where(done, t, step)
            # Not "moved <=": a row with NaN counts as done, or it would keep all rows busy to the last step.
            done = done | ~(moved > 2 * torch.finfo(t.dtype).eps)
            if not observed() and bool(done.all()):
                break
        return t

    def source(self) -> str:
        parts = {name: getattr(self, name) for name in (*_PARTS, "straight_slope")}
        return threshold_source(parts, sorted(self.params))


def dense_rows(call: Call) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, L, Dv) and the weights (B, H, L, S) before dropout, in the dtype of the
    inputs."""
    rule = call.rule
    if not isinstance(rule, RowRule):
        raise TypeError(f"a rule of rows is needed, not {type(rule).__name__}")
    logits, visible = dense_logits(call)
    symbols = {name: x[..., None] for name, x in call.row_symbols().items()}
    weights = torch.where(visible, rule.weights(logits, visible, symbols), 0.0)
    return weighted_values(call, weights, visible)
