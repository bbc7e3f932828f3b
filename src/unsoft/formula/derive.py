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

from unsoft.formula.expr import Expr, bottom_up, make, number
from unsoft.formula.operation import OPERATIONS

ZERO, ONE = number(0), number(1)


@lru_cache(maxsize=4096)
def derivative(expr: Expr, symbol: str) -> Expr:
    """Return the derivative of an expression by one of its symbols."""

    def slope(node: Expr, slopes: list[Expr]) -> Expr:
        if node.op == "sym":
            return ONE if node.name == symbol else ZERO
        rule = None if symbol not in node.symbols else OPERATIONS[node.op].slope
        return ZERO if rule is None else rule(node, *node.args, *slopes)

    return bottom_up(expr, slope)


def times(a: Expr, b: Expr) -> Expr:
    """Return a product in which an exact zero wins, and which enters a where that is zero on one side.

    The branch with the zero then stays 0 even where the other factor is infinite.

    >>> from unsoft.formula.parser import parse
    >>> times(parse("1/s"), parse("where(s > 0, s, 0)"))
    Expr('where(s > 0, 1/s*s, 0)')
    """
    if a is ZERO or b is ZERO:
        return ZERO
    if b.op == "where" and ZERO in b.args[1:]:
        condition, yes, no = b.args
        return make("where", condition, times(a, yes), times(a, no))
    return a * b


def over(a: Expr, b: Expr) -> Expr:
    """Return a quotient in which an exact zero wins, and which enters such a where too if b could vanish."""
    if a is ZERO:
        return ZERO
    if a.op == "where" and ZERO in a.args[1:] and b.op not in ("num", "sym"):
        condition, yes, no = a.args
        return make("where", condition, over(yes, b), over(no, b))
    return a / b


def off_corner(a: Expr, slope: Expr) -> Expr:
    """Return the slope of a function of ``a`` that is infinitely steep at a = 0, where abs'(0) = 0 wins."""
    if a.op != "abs" or slope is ZERO:
        return slope
    return make("where", make("eq", a, 0), ZERO, slope)
