"""+ - * / ** and the sign in front."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import signed_log
from unsoft.formula.calculus import ZERO, off_corner, over, times
from unsoft.formula.expr import Expr, make
from unsoft.formula.operation import Operation, add


def _quotient_slope(node: Expr, a: Expr, b: Expr, da: Expr, db: Expr) -> Expr:
    return over(da, b) - over(times(node, db), b)


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


add(
    Operation(
        name="add",
        arity=2,
        symbol="+",
        precedence=2,
        commutative=True,
        fold=operator.add,
        slope=lambda node, a, b, da, db: da + db,
        torch=operator.add,
        into=torch.add,
        triton="{0} + {1}",
        cpp="{0} + {1}",
        javascript="{0} + {1}",
        latex=" + ",
        sympy=lambda sympy, a, b: a + b,
        log_form=signed_log.plus,
        error=lambda v, a, b, ea, eb: ea + eb,
    )
)
add(
    Operation(
        name="sub",
        arity=2,
        symbol="-",
        precedence=2,
        fold=operator.sub,
        slope=lambda node, a, b, da, db: da - db,
        torch=operator.sub,
        into=torch.sub,
        triton="{0} - {1}",
        cpp="{0} - {1}",
        javascript="{0} - {1}",
        latex=" - ",
        sympy=lambda sympy, a, b: a - b,
        log_form=signed_log.minus,
        error=lambda v, a, b, ea, eb: ea + eb,
    )
)
add(
    Operation(
        name="mul",
        arity=2,
        symbol="*",
        precedence=3,
        commutative=True,
        fold=operator.mul,
        slope=lambda node, a, b, da, db: times(b, da) + times(a, db),
        torch=operator.mul,
        into=torch.mul,
        triton="{0} * {1}",
        cpp="{0} * {1}",
        javascript="{0} * {1}",
        latex=r"\, ",
        sympy=lambda sympy, a, b: a * b,
        log_form=signed_log.product,
        error=lambda v, a, b, ea, eb: abs(a) * eb + abs(b) * ea,
    )
)
add(
    Operation(
        name="div",
        arity=2,
        symbol="/",
        precedence=3,
        fold=operator.truediv,
        slope=_quotient_slope,
        torch=operator.truediv,
        into=torch.div,
        triton="{0} / {1}",
        cpp="{0} / {1}",
        javascript="{0} / {1}",
        latex=r"\frac{{{0}}}{{{1}}}",
        latex_binds=5,
        sympy=lambda sympy, a, b: a / b,
        log_form=signed_log.quotient,
        error=lambda v, a, b, ea, eb: (ea + abs(v) * eb) / abs(b),
    )
)
add(
    Operation(
        name="pow",
        arity=2,
        symbol="**",
        precedence=5,
        fold=math.pow,
        slope=_power_slope,
        torch=operator.pow,
        into=torch.pow,
        triton="power({0}, {1})",
        sympy=lambda sympy, a, b: a**b,
        log_form=signed_log.power,
        error=_power_error,
        exponent=lambda a, b: b * make("log", a),
    )
)
add(
    Operation(
        name="neg",
        arity=1,
        precedence=4,
        fold=operator.neg,
        slope=lambda node, a, da: -da,
        torch=operator.neg,
        into=torch.neg,
        triton="-{0}",
        cpp="-{0}",
        javascript="-{0}",
        sympy=lambda sympy, a: -a,
        log_form=signed_log.negative,
        error=lambda v, a, ea: ea,
    )
)
