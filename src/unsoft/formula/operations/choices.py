"""Operations with corners and jumps: abs, sign, relu, max, min, comparisons and where."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unsoft.formula.calculus import ZERO, times
from unsoft.formula.expr import Expr, make
from unsoft.formula.operation import COMPARISONS, Operation, add
from unsoft.formula.signed_log import SignedLog, choose, compare, minus, of_plain


def _max(a: Any, b: Any) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.maximum(a, b)
    return torch.clamp(a, min=b) if isinstance(a, Tensor) else torch.clamp(b, min=a)


def _min(a: Any, b: Any) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.minimum(a, b)
    return torch.clamp(a, max=b) if isinstance(a, Tensor) else torch.clamp(b, max=a)


def _max_into(a: Tensor, b: Tensor | float, out: Tensor) -> Tensor:
    return torch.maximum(a, b, out=out) if isinstance(b, Tensor) else torch.clamp_min(a, b, out=out)


def _min_into(a: Tensor, b: Tensor | float, out: Tensor) -> Tensor:
    return torch.minimum(a, b, out=out) if isinstance(b, Tensor) else torch.clamp_max(a, b, out=out)


def _sign(a: Tensor) -> Tensor:
    return torch.where(a.isnan(), a, torch.sign(a))  # torch.sign(nan) is 0, which would hide a bad logit


def _sign_into(a: Tensor, out: Tensor) -> Tensor:
    # The factor twice takes even the smallest number beyond 1, while 0 and NaN stay what they are.
    huge = 2.0 ** (math.frexp(torch.finfo(out.dtype).max)[1] - 1)
    return torch.mul(a, huge, out=out).mul_(huge).clamp_(-1.0, 1.0)


class _Compare:
    """A comparison that remembers the dtype of its operands, which a boolean tensor forgets."""

    def __init__(self, test: Callable[[Any, Any], Any]) -> None:
        self.test = test

    def __call__(self, a: Any, b: Any) -> tuple[Tensor, torch.dtype]:
        return self.test(a, b), (a if isinstance(a, Tensor) else b).dtype


def _where(condition: tuple[Tensor, torch.dtype], a: Tensor | float, b: Tensor | float) -> Tensor:
    chosen, dtype = condition
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = torch.full((), a, dtype=dtype, device=chosen.device)  # two numbers would give the default dtype
    return torch.where(chosen, a, b)


def _error_of(chosen: Any, ea: Any, eb: Any) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    return torch.where(torch.as_tensor(chosen), zero + ea, zero + eb)


def _difference(a: Expr, b: Expr) -> Expr:
    return make("sub", a, b)


add(
    Operation(
        name="abs",
        arity=1,
        fold=abs,
        slope=lambda node, a, da: times(make("sign", a), da),
        torch=torch.abs,
        into=torch.abs,
        triton="tl.abs({0})",
        latex=r"\left|{0}\right|",
        sympy=lambda sympy, a: sympy.Abs(a),
        sympy_name="Abs",
        log_form=lambda a: SignedLog(a.plain.abs(), a.sign.abs(), a.log),
        error=lambda v, a, ea: ea,
        corner=lambda a: a,
    )
)
add(
    Operation(
        name="sign",
        arity=1,
        fold=lambda x: float((x > 0) - (x < 0)),
        slope=lambda node, a, da: ZERO,
        torch=_sign,
        into=_sign_into,
        triton="sign({0})",
        sympy_name="sign",
        log_form=lambda a: of_plain(a.sign),
        error=lambda v, a, ea: 0.0,
        corner=lambda a: a,
    )
)
add(
    Operation(
        name="relu",
        arity=1,
        fold=lambda x: max(x, 0.0),
        slope=lambda node, a, da: make("where", make("gt", a, 0), da, ZERO),
        torch=torch.relu,
        into=lambda a, out: torch.clamp(a, min=0.0, out=out),
        triton="tl.maximum({0}, 0.0)",
        javascript="Math.max({0}, 0)",
        sympy=lambda sympy, a: sympy.Max(a, 0),
        log_form=lambda a: choose(a.sign > 0, a, of_plain(torch.zeros_like(a.plain))),
        error=lambda v, a, ea: torch.where(a > 0, ea, 0.0),
        corner=lambda a: a,
    )
)
add(
    Operation(
        name="max",
        arity=2,
        fold=max,
        slope=lambda node, a, b, da, db: make("where", make("gt", a, b), da, db),
        torch=_max,
        into=_max_into,
        triton="tl.maximum({0}, {1})",
        python="torch.maximum({0}, {1})",
        latex=r"\max({0}, {1})",
        sympy=lambda sympy, a, b: sympy.Max(a, b),
        log_form=lambda a, b: choose(minus(a, b).sign >= 0, a, b),
        error=lambda v, a, b, ea, eb: _error_of(a > b, ea, eb),
        corner=_difference,
    )
)
add(
    Operation(
        name="min",
        arity=2,
        fold=min,
        slope=lambda node, a, b, da, db: make("where", make("lt", a, b), da, db),
        torch=_min,
        into=_min_into,
        triton="tl.minimum({0}, {1})",
        python="torch.minimum({0}, {1})",
        latex=r"\min({0}, {1})",
        sympy=lambda sympy, a, b: sympy.Min(a, b),
        log_form=lambda a, b: choose(minus(a, b).sign <= 0, a, b),
        error=lambda v, a, b, ea, eb: _error_of(a < b, ea, eb),
        corner=_difference,
    )
)
add(
    Operation(
        name="where",
        arity=3,
        fold=lambda condition, a, b: a if condition else b,
        slope=lambda node, c, a, b, dc, da, db: make("where", c, da, db),
        torch=_where,
        triton="tl.where({0}, {1}, {2})",
        cpp="vselect({0}, {1}, {2})",
        javascript="{0} ? {1} : {2}",
        latex=r"\begin{{cases}} {1} & {0} \\ {2} & \text{{otherwise}} \end{{cases}}",
        latex_binds=0,
        sympy=lambda sympy, c, a, b: sympy.Piecewise((a, c), (b, True)),
        log_form=lambda c, a, b: choose(c.plain > 0, a, b),
        error=lambda v, c, a, b, ec, ea, eb: _error_of(c[0], ea, eb),
    )
)

_WRITTEN = {  # as in formulas, in JavaScript, in LaTeX; SymPy's class
    "lt": ("<", "<", " < ", "StrictLessThan"),
    "le": ("<=", "<=", r" \le ", "LessThan"),
    "gt": (">", ">", " > ", "StrictGreaterThan"),
    "ge": (">=", ">=", r" \ge ", "GreaterThan"),
    "eq": ("==", "===", " = ", "Equality"),
    "ne": ("!=", "!==", r" \ne ", "Unequality"),
}


def _comparison(name: str) -> Operation:
    symbol, javascript, latex, sympy_name = _WRITTEN[name]
    test = getattr(operator, name)
    return Operation(
        name=name,
        arity=2,
        symbol=symbol,
        precedence=1,
        fold=test,
        torch=_Compare(test),
        into=getattr(torch, name),
        cpp=f"{{0}} {symbol} {{1}}",
        triton=f"{{0}} {symbol} {{1}}",
        javascript=f"{{0}} {javascript} {{1}}",
        latex=latex,
        sympy=lambda sympy, a, b: getattr(sympy, name.capitalize())(a, b),
        sympy_name=sympy_name,
        log_form=compare(getattr(torch, name)),
        corner=_difference if name not in ("eq", "ne") else None,
    )


for _name in COMPARISONS:
    add(_comparison(_name))
