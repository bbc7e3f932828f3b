"""Exponentials and what is made of two of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import signed_log
from unsoft.formula.calculus import times
from unsoft.formula.expr import Expr, make
from unsoft.formula.operation import Operation, add, lanewise
from unsoft.formula.signed_log import SignedLog, beyond

_LN2 = math.log(2)
_EXPDIFF_JAVASCRIPT = """const $expdiff = (a, b, c) =>
  Math.abs(a - b) < 0.5 ? Math.exp(b - c) * Math.expm1(a - b) : Math.exp(a - c) - Math.exp(b - c);"""
_EXPDIFF_PYTHON = (
    "torch.where(torch.abs(({0}) - ({1})) < 0.5,"
    " torch.exp(({1}) - ({2})) * torch.expm1(torch.clamp(({0}) - ({1}), -0.5, 0.5)),"
    " torch.exp(({0}) - ({2})) - torch.exp(({1}) - ({2})))"
)


def _expdiff_of_numbers(a: float, b: float, c: float) -> float:
    if abs(a - b) < 0.5:
        return math.exp(b - c) * math.expm1(a - b)
    return math.exp(a - c) - math.exp(b - c)


def _expdiff_slope(node: Expr, a: Expr, b: Expr, c: Expr, da: Expr, db: Expr, dc: Expr) -> Expr:
    return times(make("exp", a - c), da) - times(make("exp", b - c), db) - times(node, dc)


def _expdiff_logarithm(a: SignedLog, b: SignedLog, c: SignedLog) -> SignedLog:
    return signed_log.minus(*(signed_log.exponential(signed_log.minus(x, c)) for x in (a, b)))


def _exp(x: Any) -> Any:
    return torch.exp(x) if isinstance(x, Tensor) else math.exp(x)


def _expdiff(a: Any, b: Any, c: Any) -> Any:
    difference, above, below = a - b, _exp(a - c), _exp(b - c)
    if not isinstance(difference, Tensor):
        return above - below if abs(difference) >= 0.5 else math.expm1(difference) * below
    near = torch.expm1(difference.clamp(-0.5, 0.5)) * below  # clamped: what is not chosen must be finite
    return torch.where(difference.abs() < 0.5, near, above - below)


add(
    Operation(
        name="exp",
        arity=1,
        fold=math.exp,
        slope=lambda node, a, da: times(node, da),
        torch=torch.exp,
        into=torch.exp,
        triton="tl.exp({0})",
        latex="e^{{{0}}}",
        latex_binds=5,
        sympy_name="exp",
        log_form=signed_log.exponential,
        error=lambda v, a, ea: v * ea,
        exponent=lambda a: a,
    )
)
add(
    Operation(  # exp(a) - 1, exact near 0
        name="expm1",
        arity=1,
        fold=math.expm1,
        slope=lambda node, a, da: times(make("exp", a), da),
        torch=torch.expm1,
        into=torch.expm1,
        triton="expm1({0})",
        latex=r"\left(e^{{{0}}} - 1\right)",
        sympy=lambda sympy, a: sympy.exp(a) - 1,
        log_form=beyond(600.0, torch.expm1, lambda x: x.clamp(min=0.0)),
        error=lambda v, a, ea: (v + 1) * ea,
        exponent=lambda a: a,
    )
)
add(
    Operation(  # exp(a - c) - exp(b - c), exact where a and b are close, however large c is
        name="expdiff",
        arity=3,
        fold=_expdiff_of_numbers,
        slope=_expdiff_slope,
        torch=_expdiff,
        python=_EXPDIFF_PYTHON,
        triton="expdiff({0}, {1}, {2})",
        javascript="$expdiff({0}, {1}, {2})",
        javascript_definition=_EXPDIFF_JAVASCRIPT,
        latex=r"\left(e^{{{0} - {2}}} - e^{{{1} - {2}}}\right)",
        sympy=lambda sympy, a, b, c: sympy.exp(a - c) - sympy.exp(b - c),
        log_form=_expdiff_logarithm,
        error=lambda v, a, b, c, ea, eb, ec: _exp(a - c) * ea + _exp(b - c) * eb + abs(v) * ec,
        exponent=lambda a, b, c: make("max", a, b) - c,
    )
)
add(
    Operation(
        name="sinh",
        arity=1,
        fold=math.sinh,
        slope=lambda node, a, da: times(make("cosh", a), da),
        torch=torch.sinh,
        into=torch.sinh,
        triton="sinh({0})",
        cpp_definition=lanewise("vsinh", "std::sinh"),
        latex=r"\sinh({0})",
        sympy_name="sinh",
        log_form=beyond(600.0, torch.sinh, lambda x: x.abs() - _LN2),
        exponent=lambda a: make("abs", a),
    )
)
add(
    Operation(
        name="cosh",
        arity=1,
        fold=math.cosh,
        slope=lambda node, a, da: times(make("sinh", a), da),
        torch=torch.cosh,
        into=torch.cosh,
        triton="cosh({0})",
        cpp_definition=lanewise("vcosh", "std::cosh"),
        latex=r"\cosh({0})",
        sympy_name="cosh",
        log_form=beyond(600.0, torch.cosh, lambda x: x.abs() - _LN2),
        exponent=lambda a: make("abs", a),
    )
)
