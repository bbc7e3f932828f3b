"""Values of an expression that may be far too large or small for a float:
sign and logarithm beside the value.

The moments of exp(s) at gamma = 30 reach exp(1800); a sigmoid far below its threshold is exp(-1000). Every
node of an expression is evaluated both ways, and the logarithm takes over only where the plain value has left
the range of float64. It is written apart from :mod:`unsoft.formula.evaluation`, which the engines use: the
oracle does not share their arithmetic.

>>> from unsoft.formula import parse
>>> s = torch.tensor([1000.0, 0.0, -1000.0], dtype=torch.float64)
>>> signed_log(parse("exp(s) - 1"), {"s": s}).log
tensor([1000., -inf, 0.], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unsoft.formula.expr import Expr, postorder
from unsoft.formula.operation import OPERATIONS
from unsoft.formula.signed_log import SignedLog, of_plain


def signed_log(expr: Expr, env: Mapping[str, Tensor | float]) -> SignedLog:
    """Value of an expression for float64 symbols."""
    found: dict[Expr, SignedLog] = {}
    for node in postorder(expr):
        if node.op == "num":
            found[node] = of_plain(torch.tensor(float(node.value), dtype=torch.float64))
        elif node.op == "sym":
            found[node] = of_plain(torch.as_tensor(env[node.name], dtype=torch.float64))
        else:
            operation, operands = OPERATIONS[node.op], [found[a] for a in node.args]
            if operation.log_form is None:
                found[node] = of_plain(operation.torch(*(x.plain for x in operands)))
            else:
                found[node] = operation.log_form(*operands)
    return found[expr]
