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

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft.formula import Expr, derivative, evaluate
from unsoft.formula.expr import make, postorder, symbol
from unsoft.formula.operation import COMPARISONS, OPERATIONS


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
            operation = OPERATIONS[node.op]
            if not node.symbols:
                operands = [torch.tensor(x).double() for x in operands]
            value = operation.torch(*operands)
            known[node] = value, None
            if node.op not in COMPARISONS:
                pass_on = operation.error or partial(_by_slopes, node.op)
                passed = pass_on(value, *operands, *(known[arg][1] for arg in node.args))
                known[node] = value, passed + abs(value)
    return known[expr]


def _by_slopes(op: str, value: Any, *operands_and_errors: Any) -> Any:
    """What an operation passes on by its derivatives: the default of :attr:`Operation.error`."""
    arity = OPERATIONS[op].arity
    operands, errors = operands_and_errors[:arity], operands_and_errors[arity:]
    names = [f"x{k}" for k in range(arity)]
    node = make(op, *map(symbol, names))
    env = dict(zip(names, operands, strict=True))
    return sum(
        evaluate(derivative(node, name), env).abs() * error for name, error in zip(names, errors, strict=True)
    )
