"""Products and quotients of derivatives, in which an exact zero wins and stays out of harm's way.

>>> from unsoft.formula.parser import parse
>>> times(parse("1/s"), parse("where(s > 0, s, 0)"))
Expr('where(s > 0, 1/s*s, 0)')
"""

from unsoft.formula.expr import Expr, make, number

ZERO, ONE = number(0), number(1)


def times(a: Expr, b: Expr) -> Expr:
    """Product in which an exact zero wins, and which enters a where that is zero on one side."""
    if a is ZERO or b is ZERO:
        return ZERO
    if b.op == "where" and ZERO in b.args[1:]:
        condition, yes, no = b.args
        return make("where", condition, times(a, yes), times(a, no))
    return a * b


def over(a: Expr, b: Expr) -> Expr:
    """Quotient in which an exact zero wins, and which enters such a where too if b could vanish."""
    if a is ZERO:
        return ZERO
    if a.op == "where" and ZERO in a.args[1:] and b.op not in ("num", "sym"):
        condition, yes, no = a.args
        return make("where", condition, over(yes, b), over(no, b))
    return a / b


def off_corner(a: Expr, slope: Expr) -> Expr:
    """The slope of a function of ``a`` that is infinitely steep at a = 0; abs'(0) = 0 wins against that."""
    if a.op != "abs" or slope is ZERO:
        return slope
    return make("where", make("eq", a, 0), ZERO, slope)
