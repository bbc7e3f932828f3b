"""Arithmetic on plain numbers: the value of an operation whose operands are all known.

>>> fold("add", (2, 3)), fold("max", (2, 3)), fold("lt", (2, 3))
(5.0, 3.0, True)
"""

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction

from unsoft.errors import FormulaError

_EXACT = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
}
_COMPARE = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
_FLOAT: dict[str, Callable[..., float]] = {
    **_EXACT,
    **_COMPARE,
    "pow": math.pow,
    "neg": operator.neg,
    "exp": math.exp,
    "expm1": math.expm1,
    "log": math.log,
    "sqrt": math.sqrt,
    "abs": abs,
    "sign": lambda x: float((x > 0) - (x < 0)),
    "max": max,
    "min": min,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)),
    "relu": lambda x: max(x, 0.0),
    "erf": math.erf,
    "where": lambda condition, a, b: a if condition else b,
}


def fold(op: str, values: Sequence[float | bool]) -> float | bool:
    """Value of one operation on numbers in double precision; FormulaError if that is not a finite number."""
    numbers = [v if isinstance(v, bool) else float(v) for v in values]
    try:
        result = _FLOAT[op](*numbers)
    except (ArithmeticError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        shown = ", ".join(f"{v:g}" for v in numbers)
        raise FormulaError(f"the constant {op}({shown}) is not a finite real number")
    return result


def exact(op: str, values: Sequence[float]) -> int | float | None:
    """Value of an arithmetic operation on numbers if a double can hold it without rounding, else None.

    Only such constants are folded while a formula is read, so that ``s/3`` keeps its 3 and ``1/3`` stays a
    fraction.

    >>> exact("div", (1, 4)), exact("div", (1, 3))
    (0.25, None)
    """
    if op not in _EXACT or (op == "div" and values[1] == 0) or (op == "pow" and not _small_power(*values)):
        return None
    a, b = values
    true = _EXACT[op](Fraction(a), int(b) if op == "pow" else Fraction(b))
    try:
        rounded = float(true)
    except OverflowError:
        return None
    return rounded if Fraction(rounded) == true else None


def _small_power(base: float, exponent: float) -> bool:
    return float(exponent).is_integer() and abs(exponent) <= 64 and (base != 0 or exponent > 0)
