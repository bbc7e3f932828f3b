"""Prints an expression as formula text that parses back to the same expression.

>>> from unsoft.formula.expr import symbol
>>> str(-(symbol("s") + 1) ** 2 / 3)
'-(s + 1)**2/3'
"""

from unsoft.formula.expr import Expr, postorder

INFIX = {
    "lt": " < ", "le": " <= ", "gt": " > ", "ge": " >= ", "eq": " == ", "ne": " != ",
    "add": " + ", "sub": " - ", "mul": "*", "div": "/", "pow": "**",
}  # fmt: skip
PRECEDENCE = {"add": 2, "sub": 2, "mul": 3, "div": 3, "neg": 4, "pow": 5}
ATOM = 6


def source(root: Expr) -> str:
    """Formula text of an expression."""
    text: dict[Expr, str] = {}
    for node in postorder(root):
        text[node] = _write(node, [text[a] for a in node.args])
    return text[root]


def precedence(node: Expr) -> int:
    """How tightly the printed form of a node binds; a negative number binds like a negation."""
    if node.op == "num":
        return PRECEDENCE["neg"] if node.value < 0 else ATOM
    return PRECEDENCE.get(node.op, 1 if node.op in INFIX else ATOM)


def infix(node: Expr, parts: list[str]) -> str | None:
    """An operator between its printed operands, with the brackets it needs; None for other nodes."""
    if node.op not in INFIX and node.op != "neg":
        return None
    own = precedence(node)
    # Operators group to the left, ** to the right: the other operand needs brackets at equal precedence.
    loose = {"neg": None, "pow": 1}.get(node.op, 0)
    wrapped = [
        part if precedence(arg) > own or (precedence(arg) == own and place == loose) else f"({part})"
        for place, (arg, part) in enumerate(zip(node.args, parts, strict=True))
    ]
    if node.op == "neg":
        return "-" + wrapped[0]
    left, right = wrapped
    return left + INFIX[node.op] + (f"({right})" if right.startswith("-") else right)  # s*(-2), not s*-2


def _write(node: Expr, parts: list[str]) -> str:
    if node.op == "num":
        return repr(node.value)
    if node.op == "sym":
        return node.name
    plain = infix(node, parts)
    return f"{node.op}({', '.join(parts)})" if plain is None else plain
