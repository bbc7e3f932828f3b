"""Properties of a formula, determined from its values on a grid of logits.

>>> from unsoft.formula.formula import Formula
>>> print(Formula(weight="sign(s)*exp(abs(s) - m)", mass="exp(abs(s) - m)", peak="abs(s)").properties)
Properties(signed=True, row_sum='in [-1, 1]', l1='1', sparse=False, needs_length=False, continuous=False)

Sums: with a normaliser, the sum of a row is an average of the ratios weight/mass, weighted by the mass, so it
lies between the smallest and the largest ratio; an offset moves it towards 0. Without one, the same holds for
the ratio of the weight to 1/n. Parameters have their default values; isolated logits such as cog's 0 are left
out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unsoft.formula.evaluation import evaluate
from unsoft.formula.expr import Expr, symbol
from unsoft.formula.invariance import field_value

if TYPE_CHECKING:
    from unsoft.formula.formula import Formula

# A bound that still grows from the narrow to the wide range of logits is no bound.
_NARROW, _WIDE = 10.0, 40.0
# n, i, j; positions are close to each other, so that weights which decay with the distance do not underflow.
_CASES = torch.tensor([[1, 50, 50, 10**6], [0, 12, 12, 12], [0, 0, 9, 20]], dtype=torch.float64)
# Values of fields, which may have any sign.
_QUERY_FIELD = torch.tensor([0.3, -0.7, 1.1, -0.2], dtype=torch.float64)
_KEY_FIELD = torch.tensor([-0.4, -0.9, 1.3, 0.6], dtype=torch.float64)
_TITLES = {"l1": "sum |a|"}


@dataclass(frozen=True, repr=False)
class Interval:
    """Range of a sum over the weights of a row.

    >>> Interval(-1, 1), Interval(high=1, open=True), Interval(1, 1), Interval(1, 1, power=0.5), Interval()
    ('in [-1, 1]', '< 1', '1', 'in [1, sqrt(n)]', 'free')
    """

    low: float = -math.inf
    high: float = math.inf
    open: bool = False
    """True if neither end is reached."""
    power: float = 0.0
    """``high``, and a negative ``low``, are multiplied by n**power."""
    text: str = ""
    """Text for a range that is given by learned parameters; ``of_module`` then returns its ends."""
    of_module: Callable[[Any], tuple[Tensor | float, Tensor | float]] | None = None

    @staticmethod
    def read(value: Interval | float | str) -> Interval:
        """Return the interval of a number or of a text that :meth:`__str__` writes.

        >>> Interval.read("in (0, 1)").open, Interval.read("<= 2").high, Interval.read(1).low
        (True, 2.0, 1.0)
        """
        if isinstance(value, Interval):
            return value
        text = str(value).strip()
        if text == "free":
            return Interval()
        if match := re.fullmatch(r"in ([(\[])(\S+), (\S+)[)\]]", text):
            return Interval(float(match[2]), float(match[3]), open=match[1] == "(")
        strict, bound = text.startswith("< "), text.removeprefix("< ").removeprefix("<= ")
        try:
            high = float(bound)
        except ValueError:
            raise ValueError(
                f"promises: {value!r} is not understood; say 'free', '1', '< 1', 'in [-1, 1]' or similar"
            ) from None
        return Interval(high=high, open=strict) if bound != text else Interval(high, high)

    def ends(self, n: int = 1) -> tuple[float, float]:
        """Return the lowest and the highest sum of a row of n keys."""
        size = n**self.power
        return (self.low * size if self.low < 0 else self.low), self.high * size

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.power:
            most = "sqrt(n)" if self.power == 0.5 else f"n^{self.power:.4g}"
            return f"in [-{most}, {most}]" if self.low < 0 else f"in [{self.low:g}, {most}]"
        if self.low == -math.inf:
            return "free" if self.high == math.inf else f"{'<' if self.open else '<='} {self.high:g}"
        if self.low == self.high:
            return f"{self.high:g}"
        inside = f"{self.low:g}, {self.high:g}"
        return f"in ({inside})" if self.open else f"in [{inside}]"

    def __repr__(self) -> str:
        return repr(str(self))  # short, since it is printed with the other properties


FREE, ONE = Interval(), Interval(1, 1)


@dataclass(frozen=True, kw_only=True)
class Properties:
    """Properties of the weights of a row. The defaults promise nothing."""

    signed: bool = True
    row_sum: Interval = FREE
    l1: Interval = FREE
    """Sum of absolute weights."""
    sparse: bool = False
    """The weight is exactly 0 on a whole interval of logits."""
    needs_length: bool = False
    """The weight depends on the number of visible keys."""
    continuous: bool = True
    """The weight has no jump in the logit."""

    def to_dict(self) -> dict[str, bool | str]:
        """Return the properties by name, sums as text."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(x) if isinstance(x, Interval) else x for name, x in values.items()}

    def texts(self) -> dict[str, str]:
        """Return titles and contents for a table."""
        shown = {True: "yes", False: "no"}
        texts = {name: x if isinstance(x, str) else shown[x] for name, x in self.to_dict().items()}
        return {_TITLES.get(name, name.replace("_", " ")): text for name, text in texts.items()}


def analyse(formula: Formula) -> Properties:
    """Return all properties of a formula."""
    row_sum, l1 = _sums(formula)
    return Properties(
        signed=formula.signed,
        row_sum=row_sum,
        l1=l1,
        sparse=_sparse(formula),
        needs_length="n" in formula.uses,
        continuous=all(_continuous(formula, part) for part in (formula.weight, formula.mass) if part),
    )


def is_signed(formula: Formula) -> bool:
    """Return True if any weight on the grid is negative."""
    return bool((_values(formula, formula.weight, _grid(_NARROW)) < 0).any())


def _grid(limit: float) -> Tensor:
    """Return logits, symmetric up to a small shift that avoids the usual corners of formulas, such as 0."""
    return torch.linspace(-limit, limit, 402, dtype=torch.float64) + 0.0123456789


def _values(formula: Formula, expr: Expr, s: Tensor) -> Tensor:
    """Return values for each logit (rows) and some cases of n, i, j (columns)."""
    n, i, j = _CASES
    env = {"s": _grid(_NARROW)[:, None], "n": n, "i": i, "j": j, **formula.params}
    env |= {name: field_value(name, _QUERY_FIELD) for name in formula.symbols.query}
    env |= {name: field_value(name, _KEY_FIELD) for name in formula.symbols.key}
    if formula.peak is not None:
        env["m"] = evaluate(formula.peak, env).nan_to_num(-math.inf).amax(0).clamp(-_WIDE, _WIDE)
    return evaluate(expr, env | {"s": s[:, None]})


def _sums(formula: Formula) -> tuple[Interval, Interval]:
    """Return the ranges of the sum and of the absolute sum of a row."""
    if formula.mass_degree != 1:
        return _sums_of_powers(formula)
    if not _norm_is_root(formula, 1):
        return FREE, FREE
    ratio, wide = _ratio(formula, _NARROW), _ratio(formula, _WIDE)
    size, grown = ratio.abs().amax(0), wide.abs().amax()
    seen = size[size > 0]  # where every weight is 0, as beyond a window, nothing grows
    if not grown.isfinite() or not len(seen) or grown > 1.01 * seen.min():
        return FREE, FREE
    both, offset = torch.cat([ratio, wide]), formula.offset_mass is not None
    return _interval(both, offset), _interval(both.abs(), offset)


def _ratio(formula: Formula, limit: float) -> Tensor:
    """Return weight / mass, or n weight for a formula without mass; 0/0 counts as 0."""
    s = _grid(limit)
    weight = _values(formula, formula.weight, s)
    n = _values(formula, symbol("n"), s)
    mass = 1 / n if formula.mass is None else _values(formula, formula.mass, s)
    return torch.where(weight == 0, weight, weight / mass)


def _norm_is_root(formula: Formula, p: float) -> bool:
    """Return True if the norm is the p-th root."""
    z = torch.linspace(-8, 8, 50, dtype=torch.float64).exp()
    env: dict[str, Tensor | float] = {"z": z, "m": 0.0, "n": 50.0, "i": 49.0, **formula.params}
    env |= dict.fromkeys(formula.symbols.query, 0.5)
    norm = symbol("z") if formula.norm is None else formula.norm
    return torch.allclose(evaluate(norm, env), z ** (1 / p), rtol=1e-9)


def _sums_of_powers(formula: Formula) -> tuple[Interval, Interval]:
    """Return the ranges of sums if |weight|^p = mass under the p-th root: weights of p-norm 1.

    By Hölder's inequality their absolute sum is at most n^(1 - 1/p).
    """
    p, s = formula.mass_degree, _grid(_NARROW)
    weight, mass = (_values(formula, part, s) for part in (formula.weight, formula.mass) if part)
    exact = p > 1 and torch.allclose(weight.abs() ** p, mass, rtol=1e-9) and _norm_is_root(formula, p)
    if not exact or formula.offset_mass is not None:
        return FREE, FREE
    growing = Interval(1, 1, power=1 - 1 / p)
    return (Interval(-1, 1, power=1 - 1 / p) if formula.signed else growing), growing


def _interval(ratio: Tensor, offset: bool) -> Interval:
    low, high = (float(f"{x:.3g}") for x in (ratio.min(), ratio.max()))  # the grid just misses extreme points
    if low == high and not offset:
        return Interval(low, high)
    if low >= 0:
        return Interval(high=high, open=offset)
    return Interval(low, max(high, 0) if offset else high, open=offset)


def _sparse(formula: Formula) -> bool:
    """Return True if the weight is 0 at a grid point, which represents an interval: it is no special logit.

    The range is too small for usual exponentials to underflow.
    """
    return bool((_values(formula, formula.weight, _grid(8.0)) == 0).all(1).any())


def _continuous(formula: Formula, expr: Expr) -> bool:
    """Halve every interval of the grid 32 times, keeping the half with the larger step: only jumps remain."""
    grid = _grid(8.0)
    left, right = grid[:-1], grid[1:]
    low, high = _values(formula, expr, left), _values(formula, expr, right)
    size = torch.maximum(low.abs(), high.abs()).nan_to_num(0.0).amax()
    for _ in range(32):
        middle = (left + right) / 2
        value = _values(formula, expr, middle)
        first = (value - low).abs().amax(1) > (high - value).abs().amax(1)
        left, right = torch.where(first, left, middle), torch.where(first, middle, right)
        low, high = torch.where(first[:, None], low, value), torch.where(first[:, None], value, high)
    return not bool(((high - low).abs() > 1e-6 * size).any())
