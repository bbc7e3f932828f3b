"""Symbolic derivatives.

Conventions, the same in every engine: sign' = 0, abs'(0) = sign(0) = 0, relu'(0) = 0; max and min pass the
derivative of the argument they return, at a tie that of the second; where passes the derivative of the chosen
branch, so a branch that is not chosen can never leak a NaN into a gradient. As in torch, 0**p does not depend
on p, and a**0 not on a: both derivatives are 0 there. Where abs(x) stands in something infinitely steep, such
as sqrt(abs(x)) at x = 0, the 0 of abs wins.

>>> from unsoft.formula.parse import parse
>>> derivative(parse("max(s, 0)**2 / n"), "s")
Expr('where(s > 0, 2*max(s, 0), 0)/n')
"""

import math
from collections.abc import Callable
from functools import lru_cache

from unsoft.formula.expr import COMPARISONS, Expr, make, number, postorder

ZERO, ONE = number(0), number(1)


@lru_cache(maxsize=4096)
def derivative(expr: Expr, symbol: str) -> Expr:
    """The derivative of an expression by one of its symbols."""
    slope: dict[Expr, Expr] = {}
    for node in postorder(expr):
        if symbol not in node.symbols or node.op in COMPARISONS:
            slope[node] = ZERO
        elif node.op == "sym":
            slope[node] = ONE
        else:
            slope[node] = _RULES[node.op](node, *node.args, *(slope.get(a, ZERO) for a in node.args))
    return slope[expr]


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


def _quotient(node: Expr, a: Expr, b: Expr, da: Expr, db: Expr) -> Expr:
    return over(da, b) - over(times(node, db), b)


def _power(node: Expr, a: Expr, b: Expr, da: Expr, db: Expr) -> Expr:
    by_base = by_exponent = ZERO
    if da is not ZERO:
        slope = times(b, a ** (b - 1))
        steep = b.constant is None or b.constant < 1
        if b.constant is None:
            slope = make("where", make("eq", b, 0), ZERO, slope)
        by_base = _off_corner(a, times(slope, da)) if steep else times(slope, da)
    if db is not ZERO:
        slope = times(node, make("log", a))
        if a.constant is None:
            slope = make("where", make("eq", a, 0), ZERO, slope)
        by_exponent = times(slope, db)
    return by_base + by_exponent


def _off_corner(a: Expr, slope: Expr) -> Expr:
    """The slope of a function of ``a`` that is infinitely steep at a = 0; abs'(0) = 0 wins against that."""
    if a.op != "abs" or slope is ZERO:
        return slope
    return make("where", make("eq", a, 0), ZERO, slope)


_RULES: dict[str, Callable[..., Expr]] = {
    "add": lambda node, a, b, da, db: da + db,
    "sub": lambda node, a, b, da, db: da - db,
    "mul": lambda node, a, b, da, db: times(b, da) + times(a, db),
    "div": _quotient,
    "pow": _power,
    "neg": lambda node, a, da: -da,
    "exp": lambda node, a, da: times(node, da),
    "expm1": lambda node, a, da: times(make("exp", a), da),
    "log": lambda node, a, da: _off_corner(a, over(da, a)),
    "sqrt": lambda node, a, da: _off_corner(a, over(da, 2 * node)),
    "abs": lambda node, a, da: times(make("sign", a), da),
    "sign": lambda node, a, da: ZERO,
    "tanh": lambda node, a, da: times(1 - node * node, da),
    "sigmoid": lambda node, a, da: times(node * (1 - node), da),
    "relu": lambda node, a, da: make("where", make("gt", a, 0), da, ZERO),
    "erf": lambda node, a, da: times(2 / math.sqrt(math.pi) * make("exp", -(a * a)), da),
    "max": lambda node, a, b, da, db: make("where", make("gt", a, b), da, db),
    "min": lambda node, a, b, da, db: make("where", make("lt", a, b), da, db),
    "where": lambda node, c, a, b, dc, da, db: make("where", c, da, db),
}
