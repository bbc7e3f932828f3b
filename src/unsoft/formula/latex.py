r"""Prints formulas as LaTeX.

>>> from unsoft.formula.parser import parse
>>> print(latex(parse("sign(s)*exp(abs(s) - m)/n")))
\frac{\operatorname{sign}(s)\, e^{\left|s\right| - m}}{n}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsoft.formula.expr import Expr, postorder
from unsoft.formula.operation import ATOM, OPERATIONS
from unsoft.formula.text import precedence

if TYPE_CHECKING:
    from unsoft.formula.formula import Formula

_GREEK = set(
    """
    alpha beta gamma delta epsilon zeta eta theta iota kappa mu nu xi pi rho sigma tau upsilon phi chi psi
    omega
    """.split()
)


def latex(expr: Expr) -> str:
    """LaTeX of an expression."""
    text: dict[Expr, str] = {}
    for node in postorder(expr):
        text[node] = _write(node, [text[a] for a in node.args])
    return text[expr]


def formula_latex(formula: Formula) -> str:
    r"""LaTeX of the weight :math:`a_{ij}` and of the row peak.

    >>> from unsoft.formula.formula import Formula
    >>> print(formula_latex(Formula("exp(s - m)", "exp(2*(s - m))", "s", norm="sqrt")))
    a_{ij} = \frac{e^{s - m}}{\sqrt{\sum_j e^{2\, \left(s - m\right)}}}, \qquad m = \max_j s
    """
    weight = latex(formula.weight)
    if formula.mass is None:
        return f"a_{{ij}} = {weight}"
    total = r"\sum_j " + _bracketed(formula.mass, latex(formula.mass), 3)
    if formula.offset_mass is not None:
        total += f" + {_bracketed(formula.offset_mass, latex(formula.offset_mass), 3)}"
    if formula.norm is not None:
        total = _norm(formula.norm, total)
    ratio = rf"a_{{ij}} = \frac{{{weight}}}{{{total}}}"
    if formula.peak is None:
        return ratio
    return rf"{ratio}, \qquad m = \max_j {_bracketed(formula.peak, latex(formula.peak), 3)}"


def _norm(norm: Expr, total: str) -> str:
    """The norm with the sum in the place of z, in brackets unless it stands alone in a root."""
    if norm.op == "sqrt" and norm.args[0].op == "sym":
        return rf"\sqrt{{{total}}}"
    text: dict[Expr, str] = {}
    for node in postorder(norm):
        is_z = node.op == "sym" and node.name == "z"
        text[node] = rf"\left({total}\right)" if is_z else _write(node, [text[a] for a in node.args])
    return text[norm]


def _write(node: Expr, parts: list[str]) -> str:
    match node.op:
        case "num":
            return _number(node.value)
        case "sym":
            return _symbol(node.name)
        case "neg":
            return "-" + _bracketed(node.args[0], parts[0], 3)
        case "pow":
            return f"{{{_bracketed(node.args[0], parts[0], ATOM)}}}^{{{parts[1]}}}"
    operation = OPERATIONS[node.op]
    if operation.symbol is not None and operation.latex is not None and "{0}" not in operation.latex:
        own = operation.precedence
        left, right = (
            _bracketed(arg, part, own + place)
            for place, (arg, part) in enumerate(zip(node.args, parts, strict=True))
        )
        return left + operation.latex + (rf"\left({right}\right)" if right.startswith("-") else right)
    return operation.write("latex", rf"\operatorname{{{node.op}}}", parts)


def _bracketed(node: Expr, text: str, least: int) -> str:
    """The text, in brackets if it binds less tightly than ``least``."""
    binds = precedence(node)
    if node.op not in ("num", "sym") and OPERATIONS[node.op].latex_binds != ATOM:
        binds = OPERATIONS[node.op].latex_binds  # as printed here: a fraction and an exponential like a power
    return text if binds >= least else rf"\left({text}\right)"


def _number(value: int | float) -> str:
    mantissa, _, exponent = repr(value).partition("e")
    return rf"{mantissa} \cdot 10^{{{int(exponent)}}}" if exponent else mantissa


def _symbol(name: str) -> str:
    head, _, index = name.partition("_")
    shown = rf"\{head}" if head in _GREEK else head if len(head) == 1 else rf"\mathit{{{head}}}"
    return f"{shown}_{{{index}}}" if index else shown
