"""+ - * / ** and the sign in front."""

import math
import operator
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import signed_log
from unsoft.formula.derive import ZERO, off_corner, over, times
from unsoft.formula.expr import Expr, make
from unsoft.formula.operation import add_function, add_operator


def _power_slope(node: Expr, a: Expr, b: Expr, da: Expr, db: Expr) -> Expr:
    by_base = by_exponent = ZERO
    if da is not ZERO:
        slope = times(b, a ** (b - 1))
        steep = b.constant is None or b.constant < 1
        if b.constant is None:
            slope = make("where", make("eq", b, 0), ZERO, slope)
        by_base = off_corner(a, times(slope, da)) if steep else times(slope, da)
    if db is not ZERO:
        slope = times(node, make("log", a))
        if a.constant is None:
            slope = make("where", make("eq", a, 0), ZERO, slope)
        by_exponent = times(slope, db)
    return by_base + by_exponent


def _power_error(v: Any, a: Any, b: Any, ea: Any, eb: Any) -> Any:
    passed = abs(b * a ** (b - 1)) * ea + abs(b * v)
    # The logarithm is only taken where the exponent varies, which needs a positive base anyway.
    return passed + abs(v * torch.log(a)) * eb if isinstance(b, Tensor) else passed


add_operator(
    "add",
    "+",
    operator.add,
    precedence=2,
    commutative=True,
    slope=lambda node, a, b, da, db: da + db,
    latex=" + ",
    log_form=signed_log.plus,
    error=lambda v, a, b, ea, eb: ea + eb,
)
add_operator(
    "sub",
    "-",
    operator.sub,
    precedence=2,
    slope=lambda node, a, b, da, db: da - db,
    latex=" - ",
    log_form=signed_log.minus,
    error=lambda v, a, b, ea, eb: ea + eb,
)
add_operator(
    "mul",
    "*",
    operator.mul,
    precedence=3,
    commutative=True,
    slope=lambda node, a, b, da, db: times(b, da) + times(a, db),
    latex=r"\, ",
    log_form=signed_log.product,
    error=lambda v, a, b, ea, eb: abs(a) * eb + abs(b) * ea,
)
add_operator(
    "div",
    "/",
    operator.truediv,
    precedence=3,
    slope=lambda node, a, b, da, db: over(da, b) - over(times(node, db), b),
    latex=r"\frac{{{0}}}{{{1}}}",
    latex_binds=5,
    log_form=signed_log.quotient,
    error=lambda v, a, b, ea, eb: (ea + abs(v) * eb) / abs(b),
)
add_operator(
    "pow",
    "**",
    operator.pow,
    precedence=5,
    fold=math.pow,
    slope=_power_slope,
    triton="power({0}, {1})",
    cpp=None,
    javascript=None,
    log_form=signed_log.power,
    error=_power_error,
    exponent=lambda a, b: b * make("log", a),
)
add_function(
    "neg",
    precedence=4,
    fold=operator.neg,
    slope=lambda node, a, da: -da,
    torch=operator.neg,
    triton="-{0}",
    cpp="-{0}",
    javascript="-{0}",
    log_form=signed_log.negative,
    error=lambda v, a, ea: ea,
    latex=None,
)
