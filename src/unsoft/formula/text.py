"""Prints an expression as formula text that parses back to the same expression.

>>> from unsoft.formula.expr import symbol
>>> str(-(symbol("s") + 1) ** 2 / 3)
'-(s + 1)**2/3'
"""

from unsoft.formula.expr import Expr, postorder
from unsoft.formula.operation import ATOM, OPERATIONS

_LOOSE = 2
"""Operators that bind this loosely, or more so, are printed between spaces."""


def source(root: Expr) -> str:
    """Formula text of an expression."""
    text: dict[Expr, str] = {}
    for node in postorder(root):
        text[node] = _write(node, [text[a] for a in node.args])
    return text[root]


def precedence(node: Expr) -> int:
    """How tightly the printed form of a node binds; a negative number binds like a negation."""
    if node.op == "num":
        return OPERATIONS["neg"].precedence if node.value < 0 else ATOM
    return ATOM if node.op == "sym" else OPERATIONS[node.op].precedence


def infix(node: Expr, parts: list[str]) -> str | None:
    """An operator between its printed operands, with the brackets it needs; None for other nodes."""
    own = precedence(node)
    if own == ATOM or node.op == "num":
        return None
    # Operators group to the left, ** to the right: the other operand needs brackets at equal precedence.
    loose = {"neg": None, "pow": 1}.get(node.op, 0)
    wrapped = [
        part if precedence(arg) > own or (precedence(arg) == own and place == loose) else f"({part})"
        for place, (arg, part) in enumerate(zip(node.args, parts, strict=True))
    ]
    if node.op == "neg":
        return "-" + wrapped[0]
    left, right = wrapped
    symbol = OPERATIONS[node.op].symbol or ""
    between = f" {symbol} " if own <= _LOOSE else symbol
    return left + between + (f"({right})" if right.startswith("-") else right)  # s*(-2), not s*-2


def _write(node: Expr, parts: list[str]) -> str:
    if node.op == "num":
        return repr(node.value)
    if node.op == "sym":
        return str(node.name)
    plain = infix(node, parts)
    return f"{node.op}({', '.join(parts)})" if plain is None else plain
