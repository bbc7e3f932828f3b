"""Smooth functions of one number, apart from exponentials."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import signed_log
from unsoft.formula.calculus import off_corner, over, times
from unsoft.formula.expr import make
from unsoft.formula.operation import Operation, add, lanewise
from unsoft.formula.signed_log import beyond

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


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(a: Tensor) -> Tensor:
    return torch.logaddexp(a, a.new_zeros(()))


def _softplus_into(a: Tensor, out: Tensor) -> Tensor:
    return torch.logaddexp(a, a.new_zeros(()), out=out)


def _root_error(v: Any, a: Any, ea: Any) -> Any:
    return torch.where(v == 0, 0.0, ea / (2 * v))


add(
    Operation(
        name="log",
        arity=1,
        fold=math.log,
        slope=lambda node, a, da: off_corner(a, over(da, a)),
        torch=torch.log,
        into=torch.log,
        triton="tl.log({0})",
        latex=r"\log({0})",
        sympy_name="log",
        log_form=signed_log.logarithm,
        error=lambda v, a, ea: ea / abs(a),
    )
)
add(
    Operation(  # log(1 + a), exact near 0
        name="log1p",
        arity=1,
        fold=math.log1p,
        slope=lambda node, a, da: over(da, 1 + a),
        torch=torch.log1p,
        into=torch.log1p,
        triton="log1p({0})",
        cpp_definition=lanewise("vlog1p", "std::log1p"),
        latex=r"\log(1 + {0})",
        sympy=lambda sympy, a: sympy.log(1 + a),
        log_form=lambda a: signed_log.choose(
            a.plain.abs() < 1e15, signed_log.of_plain(a.plain.log1p()), signed_log.logarithm(a)
        ),
    )
)
add(
    Operation(
        name="sqrt",
        arity=1,
        fold=math.sqrt,
        slope=lambda node, a, da: off_corner(a, over(da, 2 * node)),
        torch=torch.sqrt,
        into=torch.sqrt,
        triton="root({0})",
        latex=r"\sqrt{{{0}}}",
        log_form=signed_log.root,
        error=_root_error,
    )
)
add(
    Operation(
        name="tanh",
        arity=1,
        fold=math.tanh,
        slope=lambda node, a, da: times(1 - node * node, da),
        torch=torch.tanh,
        into=torch.tanh,
        triton="tanh({0})",
        latex=r"\tanh({0})",
        sympy_name="tanh",
        error=lambda v, a, ea: (1 - v * v) * ea,
    )
)
add(
    Operation(
        name="sin",
        arity=1,
        fold=math.sin,
        slope=lambda node, a, da: times(make("cos", a), da),
        torch=torch.sin,
        into=torch.sin,
        triton="tl.sin({0})",
        cpp_definition=lanewise("vsin", "std::sin"),
        latex=r"\sin({0})",
        sympy_name="sin",
    )
)
add(
    Operation(
        name="cos",
        arity=1,
        fold=math.cos,
        slope=lambda node, a, da: times(-make("sin", a), da),
        torch=torch.cos,
        into=torch.cos,
        triton="tl.cos({0})",
        cpp_definition=lanewise("vcos", "std::cos"),
        latex=r"\cos({0})",
        sympy_name="cos",
    )
)
add(
    Operation(
        name="sigmoid",
        arity=1,
        fold=_sigmoid,
        slope=lambda node, a, da: times(node * (1 - node), da),
        torch=torch.sigmoid,
        into=torch.sigmoid,
        triton="sigmoid({0})",
        javascript="$sigmoid({0})",
        javascript_definition="const $sigmoid = (x) => 1 / (1 + Math.exp(-x));",
        latex=r"\sigma({0})",
        sympy=lambda sympy, a: 1 / (1 + sympy.exp(-a)),
        log_form=beyond(0.0, torch.sigmoid, torch.nn.functional.logsigmoid),
        error=lambda v, a, ea: v * (1 - v) * ea,
    )
)
add(
    Operation(  # log(1 + exp(a)), which never overflows
        name="softplus",
        arity=1,
        fold=lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
        slope=lambda node, a, da: times(make("sigmoid", a), da),
        torch=_softplus,
        into=_softplus_into,
        triton="softplus({0})",
        python="torch.logaddexp({0}, torch.zeros_like({0}))",
        cpp_definition=_SOFTPLUS + lanewise("vsoftplus", "softplus"),
        javascript="$softplus({0})",
        javascript_definition="const $softplus = (x) => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));",
        sympy=lambda sympy, a: sympy.log(1 + sympy.exp(a)),
        log_form=beyond(600.0, _softplus, lambda x: torch.where(x < 0, x, x.abs().log())),
    )
)
add(
    Operation(
        name="erf",
        arity=1,
        fold=math.erf,
        slope=lambda node, a, da: times(2 / math.sqrt(math.pi) * make("exp", -(a * a)), da),
        torch=torch.erf,
        into=torch.erf,
        triton="tl.erf({0})",
        javascript="$erf({0})",
        javascript_definition=_ERF,
        sympy_name="erf",
        error=lambda v, a, ea: 2 / math.sqrt(math.pi) * torch.exp(-a * a) * ea,
    )
)
