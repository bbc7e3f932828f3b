"""Symbolic derivatives, by the slopes in the records of the operations.

Conventions, the same in every engine: sign' = 0, abs'(0) = sign(0) = 0, relu'(0) = 0; max and min pass the
derivative of the argument they return, at a tie that of the second; where passes the derivative of the chosen
branch, so a branch that is not chosen can never leak a NaN into a gradient. As in torch, 0**p does not depend
on p, and a**0 not on a: both derivatives are 0 there. Where abs(x) is inside something infinitely steep, such
as sqrt(abs(x)) at x = 0, the 0 of abs wins.

>>> from unsoft.formula.parser import parse
>>> derivative(parse("max(s, 0)**2 / n"), "s")
Expr('where(s > 0, 2*max(s, 0), 0)/n')
"""

from functools import lru_cache

from unsoft.formula.calculus import ONE, ZERO
from unsoft.formula.expr import Expr, postorder
from unsoft.formula.operation import OPERATIONS


@lru_cache(maxsize=4096)
def derivative(expr: Expr, symbol: str) -> Expr:
    """The derivative of an expression by one of its symbols."""
    slopes: dict[Expr, Expr] = {}
    for node in postorder(expr):
        rule = None if node.op in ("num", "sym") else OPERATIONS[node.op].slope
        if node.op == "sym" and node.name == symbol:
            slopes[node] = ONE
        elif symbol not in node.symbols or rule is None:
            slopes[node] = ZERO
        else:
            slopes[node] = rule(node, *node.args, *(slopes[a] for a in node.args))
    return slopes[expr]
