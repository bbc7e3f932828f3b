"""Smooth functions: exponentials and their differences, then logarithms, roots and sigmoids."""

import math
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import signed_log
from unsoft.formula.derive import off_corner, over, times
from unsoft.formula.expr import Expr, make
from unsoft.formula.operation import add_function, lanewise
from unsoft.formula.signed_log import SignedLog, beyond

_LN2 = math.log(2)
_EXPDIFF_JAVASCRIPT = """const $expdiff = (a, b, c) =>
  Math.abs(a - b) < 0.5 ? Math.exp(b - c) * Math.expm1(a - b) : Math.exp(a - c) - Math.exp(b - c);"""
_EXPDIFF_PYTHON = (
    "torch.where(torch.abs(({0}) - ({1})) < 0.5,"
    " torch.exp(({1}) - ({2})) * torch.expm1(torch.clamp(({0}) - ({1}), -0.5, 0.5)),"
    " torch.exp(({0}) - ({2})) - torch.exp(({1}) - ({2})))"
)
_ERF = """const $erf = (x) => {
  const a = Math.abs(x);
  if (a > 6) return Math.sign(x);
  if (a < 2.5) {  // series with positive terms only
    let term = x, sum = x;
    for (let k = 1; Math.abs(term) > 1e-17 * Math.abs(sum); k++) sum += term *= 2 * x * x / (2 * k + 1);
    return 2 / Math.sqrt(Math.PI) * Math.exp(-x * x) * sum;
  }
  let tail = 0;  // continued fraction of 1 - erf
  for (let k = 60; k > 0; k--) tail = k / 2 / (a + tail);
  return Math.sign(x) * (1 - Math.exp(-x * x) / (Math.sqrt(Math.PI) * (a + tail)));
};"""
_SOFTPLUS = """static inline real softplus(real x) {
    return (x > 0 ? x : real(0)) + std::log1p(std::exp(-std::fabs(x)));
}
"""


def _expdiff(a: Any, b: Any, c: Any) -> Any:
    """Return exp(a - c) - exp(b - c). For close a and b, expm1 keeps the digits that subtracting loses."""
    difference, above, below = a - b, _exp(a - c), _exp(b - c)
    if not isinstance(difference, Tensor):
        return above - below if abs(difference) >= 0.5 else math.expm1(difference) * below
    near = torch.expm1(difference.clamp(-0.5, 0.5)) * below  # clamped: the branch not taken must be finite
    return torch.where(difference.abs() < 0.5, near, above - below)


def _exp(x: Any) -> Any:
    return torch.exp(x) if isinstance(x, Tensor) else math.exp(x)


def _expdiff_slope(node: Expr, a: Expr, b: Expr, c: Expr, da: Expr, db: Expr, dc: Expr) -> Expr:
    return times(make("exp", a - c), da) - times(make("exp", b - c), db) - times(node, dc)


def _expdiff_logarithm(a: SignedLog, b: SignedLog, c: SignedLog) -> SignedLog:
    return signed_log.minus(*(signed_log.exponential(signed_log.minus(x, c)) for x in (a, b)))


def _log1p_logarithm(a: SignedLog) -> SignedLog:
    # From 1e15 on, 1 + a is a in float64, and log(a) is still known where a itself overflows.
    near = signed_log.of_plain(a.plain.log1p())
    return signed_log.choose(a.plain.abs() < 1e15, near, signed_log.logarithm(a))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(a: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.logaddexp(a, a.new_zeros(()), out=out)


add_function(
    "exp",
    slope=lambda node, a, da: times(node, da),
    triton="tl.exp({0})",
    latex="e^{{{0}}}",
    latex_binds=5,
    log_form=signed_log.exponential,
    error=lambda v, a, ea: v * ea,
    exponent=lambda a: a,
)
add_function(  # exp(a) - 1, exact near 0
    "expm1",
    slope=lambda node, a, da: times(make("exp", a), da),
    latex=r"\left(e^{{{0}}} - 1\right)",
    log_form=beyond(600.0, torch.expm1, lambda x: x.clamp(min=0.0)),
    error=lambda v, a, ea: (v + 1) * ea,
    exponent=lambda a: a,
)
add_function(  # exp(a - c) - exp(b - c), exact where a and b are close, however large c is
    "expdiff",
    arity=3,
    fold=_expdiff,
    slope=_expdiff_slope,
    torch=_expdiff,
    python=_EXPDIFF_PYTHON,
    triton="expdiff({0}, {1}, {2})",
    javascript="$expdiff({0}, {1}, {2})",
    javascript_definition=_EXPDIFF_JAVASCRIPT,
    latex=r"\left(e^{{{0} - {2}}} - e^{{{1} - {2}}}\right)",
    log_form=_expdiff_logarithm,
    error=lambda v, a, b, c, ea, eb, ec: _exp(a - c) * ea + _exp(b - c) * eb + abs(v) * ec,
    exponent=lambda a, b, c: make("max", a, b) - c,
)


def _add_hyperbolic(name: str, slope: str) -> None:
    add_function(
        name,
        slope=lambda node, a, da: times(make(slope, a), da),
        cpp_definition=lanewise(f"v{name}", f"std::{name}"),
        # Beyond 600 the other exponential is below the last digit: log(exp(|x|) / 2).
        log_form=beyond(600.0, getattr(torch, name), lambda x: x.abs() - _LN2),
        exponent=lambda a: make("abs", a),
    )


_add_hyperbolic("sinh", "cosh")
_add_hyperbolic("cosh", "sinh")
add_function(
    "log",
    slope=lambda node, a, da: off_corner(a, over(da, a)),
    triton="tl.log({0})",
    log_form=signed_log.logarithm,
    error=lambda v, a, ea: ea / abs(a),
)
add_function(  # log(1 + a), exact near 0
    "log1p",
    slope=lambda node, a, da: over(da, 1 + a),
    cpp_definition=lanewise("vlog1p", "std::log1p"),
    latex=r"\log(1 + {0})",
    log_form=_log1p_logarithm,
)
add_function(
    "sqrt",
    slope=lambda node, a, da: off_corner(a, over(da, 2 * node)),
    triton="root({0})",
    latex=r"\sqrt{{{0}}}",
    log_form=signed_log.root,
    error=lambda v, a, ea: torch.where(v == 0, 0.0, ea / (2 * v)),
)
add_function(
    "tanh", slope=lambda node, a, da: times(1 - node * node, da), error=lambda v, a, ea: (1 - v * v) * ea
)
add_function(
    "sin",
    slope=lambda node, a, da: times(make("cos", a), da),
    triton="tl.sin({0})",
    cpp_definition=lanewise("vsin", "std::sin"),
)
add_function(
    "cos",
    slope=lambda node, a, da: times(-make("sin", a), da),
    triton="tl.cos({0})",
    cpp_definition=lanewise("vcos", "std::cos"),
)
add_function(
    "sigmoid",
    fold=_sigmoid,
    slope=lambda node, a, da: times(node * (1 - node), da),
    javascript="$sigmoid({0})",
    javascript_definition="const $sigmoid = (x) => 1 / (1 + Math.exp(-x));",
    latex=r"\sigma({0})",
    log_form=beyond(0.0, torch.sigmoid, torch.nn.functional.logsigmoid),
    error=lambda v, a, ea: v * (1 - v) * ea,
)
add_function(  # log(1 + exp(a)), which never overflows
    "softplus",
    fold=lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
    slope=lambda node, a, da: times(make("sigmoid", a), da),
    torch=_softplus,
    into=_softplus,
    python="torch.logaddexp({0}, torch.zeros_like({0}))",
    cpp_definition=_SOFTPLUS + lanewise("vsoftplus", "softplus"),
    javascript="$softplus({0})",
    javascript_definition="const $softplus = (x) => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));",
    latex=None,
    log_form=beyond(600.0, _softplus, lambda x: torch.where(x < 0, x, x.abs().log())),
)
add_function(
    "erf",
    slope=lambda node, a, da: times(2 / math.sqrt(math.pi) * make("exp", -(a * a)), da),
    triton="tl.erf({0})",
    javascript="$erf({0})",
    javascript_definition=_ERF,
    latex=None,
    error=lambda v, a, ea: 2 / math.sqrt(math.pi) * torch.exp(-a * a) * ea,
)
