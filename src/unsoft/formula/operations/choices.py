"""Operations with corners and jumps: abs, sign, relu, max, min, comparisons and where."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unsoft.formula.derive import ZERO, times
from unsoft.formula.expr import Expr, make
from unsoft.formula.operation import add_function, add_operator
from unsoft.formula.signed_log import SignedLog, choose, compare, minus, of_plain


def _sign(a: Tensor) -> Tensor:
    return torch.where(a.isnan(), a, torch.sign(a))  # torch.sign(nan) is 0, which would hide a bad logit


def _sign_into(a: Tensor, out: Tensor) -> Tensor:
    # Applied twice, the factor takes even the smallest number beyond 1; 0 and NaN are unchanged.
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


add_function(
    "abs",
    fold=abs,
    slope=lambda node, a, da: times(make("sign", a), da),
    triton="tl.abs({0})",
    latex=r"\left|{0}\right|",
    log_form=lambda a: SignedLog(a.plain.abs(), a.sign.abs(), a.log),
    error=lambda v, a, ea: ea,
    corner=lambda a: a,
)
add_function(
    "sign",
    fold=lambda x: float((x > 0) - (x < 0)),
    slope=lambda node, a, da: ZERO,
    torch=_sign,
    into=_sign_into,
    latex=None,
    log_form=lambda a: of_plain(a.sign),
    error=lambda v, a, ea: 0.0,
    corner=lambda a: a,
)
add_function(
    "relu",
    fold=lambda x: max(x, 0.0),
    slope=lambda node, a, da: make("where", make("gt", a, 0), da, ZERO),
    into=lambda a, out: torch.clamp(a, min=0.0, out=out),
    triton="tl.maximum({0}, 0.0)",
    javascript="Math.max({0}, 0)",
    latex=None,
    log_form=lambda a: choose(a.sign > 0, a, of_plain(torch.zeros_like(a.plain))),
    error=lambda v, a, ea: torch.where(a > 0, ea, 0.0),
    corner=lambda a: a,
)


def _add_extremum(name: str, *, wins: str, fold: Callable[..., float], clamp: Callable[..., Tensor]) -> None:
    """Add max or min: the first operand where it ``wins`` against the second, which wins a tie."""
    of_tensors = getattr(torch, f"{name}imum")

    def value(a: Any, b: Any, out: Tensor | None = None) -> Any:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return of_tensors(a, b, out=out)
        return clamp(a, b, out=out) if isinstance(a, Tensor) else clamp(b, a, out=out)

    def first(a: Any, b: Any) -> Any:
        return getattr(operator, wins)(a, b)

    add_function(
        name,
        arity=2,
        fold=fold,
        slope=lambda node, a, b, da, db: make("where", make(wins, a, b), da, db),
        torch=value,
        into=value,
        triton=f"tl.{name}imum({{0}}, {{1}})",
        python=f"torch.{name}imum({{0}}, {{1}})",
        latex=rf"\{name}({{0}}, {{1}})",
        log_form=lambda a, b: choose(first(minus(a, b).sign, 0), a, b),
        error=lambda v, a, b, ea, eb: _error_of(first(a, b), ea, eb),
        corner=_difference,
    )


_add_extremum("max", wins="gt", fold=max, clamp=torch.clamp_min)
_add_extremum("min", wins="lt", fold=min, clamp=torch.clamp_max)
add_function(
    "where",
    arity=3,
    fold=lambda condition, a, b: a if condition else b,
    slope=lambda node, c, a, b, dc, da, db: make("where", c, da, db),
    torch=_where,
    triton="tl.where({0}, {1}, {2})",
    cpp="vselect({0}, {1}, {2})",
    javascript="{0} ? {1} : {2}",
    latex=r"\begin{{cases}} {1} & {0} \\ {2} & \text{{otherwise}} \end{{cases}}",
    latex_binds=0,
    log_form=lambda c, a, b: choose(c.plain > 0, a, b),
    error=lambda v, c, a, b, ec, ea, eb: _error_of(c[0], ea, eb),
    into=None,
)


def _add_comparison(name: str, symbol: str, javascript: str, latex: str) -> None:
    test = getattr(operator, name)
    add_operator(
        name,
        symbol,
        test,
        precedence=1,
        torch=_Compare(test),
        javascript=f"{{0}} {javascript} {{1}}",
        latex=latex,
        log_form=compare(getattr(torch, name)),
        corner=_difference if name not in ("eq", "ne") else None,
    )


_add_comparison("lt", "<", "<", " < ")
_add_comparison("le", "<=", "<=", r" \le ")
_add_comparison("gt", ">", ">", " > ")
_add_comparison("ge", ">=", ">=", r" \ge ")
_add_comparison("eq", "==", "===", " = ")
_add_comparison("ne", "!=", "!==", r" \ne ")
