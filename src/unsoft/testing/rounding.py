"""Running error analysis: the value of an expression together with the size of its rounding error.

Every operation passes on the errors of its operands, multiplied by its slope, and adds its own rounding.
Errors are in units of the machine precision, to first order. So a difference gets the error of its terms:

>>> from unsoft.formula import parse
>>> s = torch.tensor([0.5, 20.0], dtype=torch.float64)
>>> value, error = with_error(parse("1 - tanh(s)**2"), {"s": s}, {"s": s})
>>> (error / value > 100).tolist()        # at 20 not a digit of the difference is left
[False, True]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import Expr
from unsoft.formula.expr import COMPARISONS, postorder
from unsoft.formula.torch_ops import TORCH


def with_error(expr: Expr, values: Mapping[str, Tensor], errors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Value and error of an expression, given the values of its symbols and the errors of some of them."""
    known: dict[Expr, tuple[Any, Any]] = {}
    for node in postorder(expr):
        if node.op == "num":
            known[node] = float(node.value), abs(float(node.value))
        elif node.op == "sym":
            known[node] = values[node.name], errors.get(node.name, 0.0)
        else:
            operands = [known[arg][0] for arg in node.args]
            value = TORCH[node.op](
                *(operands if node.symbols else [torch.tensor(x).double() for x in operands])
            )
            known[node] = value, None
            if node.op not in COMPARISONS:
                passed = _PASSED[node.op](value, *operands, *(known[arg][1] for arg in node.args))
                known[node] = value, passed + abs(value)
    return known[expr]


def _power(v: Any, a: Any, b: Any, ea: Any, eb: Any) -> Any:
    passed = abs(b * a ** (b - 1)) * ea + abs(b * v)
    # The logarithm is only taken where the exponent varies, which needs a positive base anyway.
    return passed + abs(v * torch.log(a)) * eb if isinstance(b, Tensor) else passed


def _choose(condition: Any, a: Any, b: Any) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    return torch.where(condition, zero + a, zero + b)


_PASSED: dict[str, Callable[..., Any]] = {
    "add": lambda v, a, b, ea, eb: ea + eb,
    "sub": lambda v, a, b, ea, eb: ea + eb,
    "mul": lambda v, a, b, ea, eb: abs(a) * eb + abs(b) * ea,
    "div": lambda v, a, b, ea, eb: (ea + abs(v) * eb) / abs(b),
    "pow": _power,
    "neg": lambda v, a, ea: ea,
    "abs": lambda v, a, ea: ea,
    "sign": lambda v, a, ea: 0.0,
    "relu": lambda v, a, ea: torch.where(a > 0, ea, 0.0),
    "exp": lambda v, a, ea: v * ea,
    "expm1": lambda v, a, ea: (v + 1) * ea,
    "log": lambda v, a, ea: ea / abs(a),
    "sqrt": lambda v, a, ea: torch.where(v == 0, 0.0, ea / (2 * v)),
    "tanh": lambda v, a, ea: (1 - v * v) * ea,
    "sigmoid": lambda v, a, ea: v * (1 - v) * ea,
    "erf": lambda v, a, ea: 2 / math.sqrt(math.pi) * torch.exp(-a * a) * ea,
    "max": lambda v, a, b, ea, eb: _choose(torch.as_tensor(a > b), ea, eb),
    "min": lambda v, a, b, ea, eb: _choose(torch.as_tensor(a < b), ea, eb),
    "where": lambda v, c, a, b, ec, ea, eb: _choose(c[0], ea, eb),
}
