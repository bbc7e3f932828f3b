"""Replaces a symbol of an expression by an expression."""

from unsoft.formula.expr import Expr, make, postorder


def substitute(expr: Expr, name: str, replacement: Expr) -> Expr:
    """The expression with a symbol replaced.

    >>> from unsoft.formula.parse import parse
    >>> substitute(parse("exp(s - m)"), "s", parse("2*s"))
    Expr('exp(2*s - m)')
    """
    new: dict[Expr, Expr] = {}
    for node in postorder(expr):
        if node.op == "sym" and node.name == name:
            new[node] = replacement
        else:
            new[node] = make(node.op, *(new[a] for a in node.args)) if name in node.symbols else node
    return new[expr]
