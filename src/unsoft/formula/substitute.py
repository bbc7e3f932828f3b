"""Replaces a part of an expression by an expression."""

from unsoft.formula.expr import Expr, make, postorder, symbol


def substitute(expr: Expr, part: str | Expr, replacement: Expr) -> Expr:
    """The expression with a symbol, or every occurrence of a larger part, replaced.

    >>> from unsoft.formula.parser import parse
    >>> substitute(parse("exp(s - m)"), "s", parse("2*s"))
    Expr('exp(2*s - m)')
    >>> substitute(parse("exp(2*s) + 2*s"), parse("2*s"), parse("n"))
    Expr('exp(n) + n')
    """
    part = symbol(part) if isinstance(part, str) else part
    new: dict[Expr, Expr] = {}
    for node in postorder(expr):
        if node is part:
            new[node] = replacement
        else:
            new[node] = make(node.op, *(new[a] for a in node.args)) if node.args else node
    return new[expr]
