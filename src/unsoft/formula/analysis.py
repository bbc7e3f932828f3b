"""What a formula promises, found by looking at its values on a grid of logits.

>>> from unsoft.formula.formula import Formula
>>> print(Formula(weight="sign(s)*exp(abs(s) - m)", mass="exp(abs(s) - m)", peak="abs(s)").properties)
Properties(signed=True, row_sum='in [-1, 1]', l1='1', sparse=False, needs_length=False, continuous=False)

The reasoning about sums: with a normaliser, the sum of a row is an average of the ratios weight/mass,
weighted by the mass, so it lies between the smallest and the largest ratio; an offset pulls it towards 0.
Without one, the same holds for the ratio of the weight to 1/n. Parameters have their default values; isolated
logits such as cog's 0 are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unsoft.formula.evaluation import evaluate
from unsoft.formula.expr import Expr, symbol
from unsoft.formula.invariance import field_value

if TYPE_CHECKING:
    from unsoft.formula.formula import Formula

# A bound that still grows from the narrow to the wide range of logits is no bound.
_NARROW, _WIDE = 10.0, 40.0
# n, i, j; the positions are near each other, so that weights which fade with the distance do not underflow.
_CASES = torch.tensor([[1, 50, 50, 10**6], [0, 12, 12, 12], [0, 0, 9, 20]], dtype=torch.float64)
# Fields, which may have any sign.
_QUERY_FIELD = torch.tensor([0.3, -0.7, 1.1, -0.2], dtype=torch.float64)
_KEY_FIELD = torch.tensor([-0.4, -0.9, 1.3, 0.6], dtype=torch.float64)
_TITLES = {"l1": "sum |a|"}


@dataclass(frozen=True)
class Properties:
    """Promises of a formula about the weights of a row.

    ``row_sum`` and ``l1`` (the sum of absolute weights) are texts such as "1", "< 1", "in [-1, 1]" or "free";
    ``sparse``: the weight is exactly 0 on a whole interval of logits; ``needs_length``: it depends on the
    number of visible keys; ``continuous``: no jump in the logit.
    """

    signed: bool
    row_sum: str
    l1: str
    sparse: bool
    needs_length: bool
    continuous: bool

    def texts(self) -> dict[str, str]:
        """Titles and contents for a table."""
        shown = {True: "yes", False: "no"}
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {_TITLES.get(name, name.replace("_", " ")): shown.get(x, x) for name, x in values.items()}


def analyse(formula: Formula) -> Properties:
    """All properties of a formula."""
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
    """Is any weight on the grid negative?"""
    return bool((_values(formula, formula.weight, _grid(_NARROW)) < 0).any())


def _grid(limit: float) -> Tensor:
    """Logits, symmetric up to a small shift that keeps them off the corners that formulas tend to have."""
    return torch.linspace(-limit, limit, 402, dtype=torch.float64) + 0.0123456789


def _values(formula: Formula, expr: Expr, s: Tensor) -> Tensor:
    """Values for each logit (rows) and some cases of n, i, j (columns)."""
    n, i, j = _CASES
    env = {"s": _grid(_NARROW)[:, None], "n": n, "i": i, "j": j, **formula.params}
    env |= {name: field_value(name, _QUERY_FIELD) for name in formula.symbols.query}
    env |= {name: field_value(name, _KEY_FIELD) for name in formula.symbols.key}
    if formula.peak is not None:
        env["m"] = evaluate(formula.peak, env).nan_to_num(-math.inf).amax(0).clamp(-_WIDE, _WIDE)
    return evaluate(expr, env | {"s": s[:, None]})


def _sums(formula: Formula) -> tuple[str, str]:
    if formula.mass_degree != 1:
        return _sums_of_powers(formula)
    if not _norm_is(formula, 1):
        return "free", "free"
    ratio, wide = _ratio(formula, _NARROW), _ratio(formula, _WIDE)
    size, grown = ratio.abs().amax(0), wide.abs().amax()
    seen = size[size > 0]  # where every weight is 0, as beyond a window, nothing grows
    if not grown.isfinite() or not len(seen) or grown > 1.01 * seen.min():
        return "free", "free"
    both, offset = torch.cat([ratio, wide]), formula.offset_mass is not None
    return _interval(both, offset), _interval(both.abs(), offset)


def _ratio(formula: Formula, limit: float) -> Tensor:
    """weight / mass, or n weight for a formula without mass; 0/0 counts as 0."""
    s = _grid(limit)
    weight = _values(formula, formula.weight, s)
    n = _values(formula, symbol("n"), s)
    mass = 1 / n if formula.mass is None else _values(formula, formula.mass, s)
    return torch.where(weight == 0, weight, weight / mass)


def _norm_is(formula: Formula, p: float) -> bool:
    """Is the norm the p-th root?"""
    z = torch.linspace(-8, 8, 50, dtype=torch.float64).exp()
    env: dict[str, Tensor | float] = {"z": z, "m": 0.0, "n": 50.0, "i": 49.0, **formula.params}
    env |= dict.fromkeys(formula.symbols.query, 0.5)
    norm = symbol("z") if formula.norm is None else formula.norm
    return torch.allclose(evaluate(norm, env), z ** (1 / p), rtol=1e-9)


def _sums_of_powers(formula: Formula) -> tuple[str, str]:
    """|weight|^p = mass under the p-th root: weights of p-norm 1, of absolute sum at most n^(1 - 1/p)."""
    p, s = formula.mass_degree, _grid(_NARROW)
    weight, mass = (_values(formula, part, s) for part in (formula.weight, formula.mass) if part)
    exact = p > 1 and torch.allclose(weight.abs() ** p, mass, rtol=1e-9) and _norm_is(formula, p)
    if not exact or formula.offset_mass is not None:
        return "free", "free"
    most = "sqrt(n)" if p == 2 else f"n^{1 - 1 / p:.4g}"
    return (f"in [-{most}, {most}]" if formula.signed else f"in [1, {most}]"), f"in [1, {most}]"


def _interval(ratio: Tensor, offset: bool) -> str:
    low, high = (float(f"{x:.3g}") for x in (ratio.min(), ratio.max()))  # the grid just misses extreme points
    if low == high and not offset:
        return f"{high:g}"
    if low >= 0:
        return f"{'<' if offset else '<='} {high:g}"
    return f"in ({low:g}, {max(high, 0):g})" if offset else f"in [{low:g}, {high:g}]"


def _sparse(formula: Formula) -> bool:
    """A weight of 0 at a grid point, which is no special logit, stands for an interval.

    The range is too small for usual exponentials to underflow.
    """
    return bool((_values(formula, formula.weight, _grid(8.0)) == 0).all(1).any())


def _continuous(formula: Formula, expr: Expr) -> bool:
    """Halves every interval of the grid 32 times, keeping the half with the larger step: jumps stay."""
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
