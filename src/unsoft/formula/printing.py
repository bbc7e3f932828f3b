r"""Prints formulas for people: as torch code to copy into other projects, which unsoft never runs, and LaTeX.

>>> from unsoft.formula.parser import parse
>>> torch_expression(parse("sign(s)*exp(abs(s) - m)"))
'torch.sign(s)*torch.exp(torch.abs(s) - m)'
>>> print(latex(parse("sign(s)*exp(abs(s) - m)/n")))
\frac{\operatorname{sign}(s)\, e^{\left|s\right| - m}}{n}
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from unsoft.formula.expr import Expr, bottom_up, infix, precedence
from unsoft.formula.operation import ATOM, OPERATIONS

if TYPE_CHECKING:
    from unsoft.formula.formula import Formula

_GREEK = set(
    """
    alpha beta gamma delta epsilon zeta eta theta iota kappa mu nu xi pi rho sigma tau upsilon phi chi psi
    omega
    """.split()
)


def torch_expression(expr: Expr) -> str:
    """Return Python text of an expression whose symbols are tensors."""
    return bottom_up(expr, _torch_node)


def torch_source(formula: Formula) -> str:
    """Return a Python function from logits to the weights of each row.

    >>> from unsoft.formula.formula import Formula
    >>> print(torch_source(Formula("exp(s - m)", "exp(s - m)", "s")))
    import torch
    <BLANKLINE>
    <BLANKLINE>
    def weights(s):
        \"\"\"Attention weights from logits; the last dimension runs over the visible keys.\"\"\"
        m = s.amax(-1, keepdim=True)
        weight = torch.exp(s - m)
        total = torch.exp(s - m).sum(-1, keepdim=True)
        return torch.where(total == 0, 0.0, weight / total)
    <BLANKLINE>
    """
    params = "".join(f", {name}" for name in formula.symbols.all)
    params += "".join(f", {name}={value!r}" for name, value in formula.params.items())
    lines = _symbols(formula)
    if formula.peak is not None:
        lines.append(f"m = {_in_brackets(_per_key(formula.peak))}.amax(-1, keepdim=True)")
    lines.append(f"weight = {_per_key(formula.weight)}")
    if formula.mass is None:
        lines.append("return weight")
    else:
        lines.append(f"total = {_in_brackets(_per_key(formula.mass))}.sum(-1, keepdim=True)")
        if formula.offset_mass is not None:
            lines[-1] += f" + {_in_brackets(torch_expression(formula.offset_mass))}"
        if formula.norm is not None:
            lines += ["z = total", f"total = {torch_expression(formula.norm)}"]
        lines.append("return torch.where(total == 0, 0.0, weight / total)")
    body = "".join(f"    {line}\n" for line in lines)
    doc = '"""Attention weights from logits; the last dimension runs over the visible keys."""'
    return f"import torch\n\n\ndef weights(s{params}):\n    {doc}\n{body}"


def _symbols(formula: Formula) -> list[str]:
    lines = [f"{name} = torch.as_tensor({name}, dtype=s.dtype, device=s.device)" for name in formula.params]
    if formula.uses & {"n", "i"}:
        lines.append("n = torch.tensor(s.shape[-1], dtype=s.dtype, device=s.device)")
    if "i" in formula.uses:
        lines.append("i = n - 1")
    if "j" in formula.uses:
        lines.append("j = torch.arange(s.shape[-1], dtype=s.dtype, device=s.device)")
    return lines


def _per_key(expr: Expr) -> str:
    """Return the text of an expression with one value for each key."""
    text = torch_expression(expr)
    return text if "s" in expr.symbols else f"({text})*torch.ones_like(s)"


def _in_brackets(text: str) -> str:
    """Return the text, in brackets unless it is a name or one call."""
    return text if re.fullmatch(r"[\w.]+(\([^()]*\))?", text) else f"({text})"


def _torch_node(node: Expr, parts: list[str]) -> str:
    if (plain := infix(node, parts)) is not None:
        return plain
    if node.constant is not None:  # torch's functions take no plain numbers
        return f"({node.constant!r})"
    numbers = [a.constant is not None for a in node.args]
    if node.op in ("max", "min") and any(numbers):
        tensor, limit = parts if numbers[1] else reversed(parts)
        return f"torch.clamp({tensor}, {'min' if node.op == 'max' else 'max'}={limit})"
    if node.op == "where" and all(numbers[1:]):  # two plain numbers would give the default dtype
        parts = [parts[0], f"torch.tensor({parts[1]}, dtype=s.dtype, device=s.device)", parts[2]]
    return OPERATIONS[node.op].write("python", f"torch.{node.op}", parts)


def latex(expr: Expr) -> str:
    """Return LaTeX of an expression."""
    return bottom_up(expr, _latex_node)


def formula_latex(formula: Formula) -> str:
    r"""Return LaTeX of the weight :math:`a_{ij}` and of the row peak.

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
    """Return the norm with the sum in the place of z, in brackets unless it is all of a root."""
    if norm.op == "sqrt" and norm.args[0].op == "sym":
        return rf"\sqrt{{{total}}}"

    def node_text(node: Expr, parts: list[str]) -> str:
        return rf"\left({total}\right)" if node.name == "z" else _latex_node(node, parts)

    return bottom_up(norm, node_text)


def _latex_node(node: Expr, parts: list[str]) -> str:
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
            _bracketed(arg, part, own + k) for k, (arg, part) in enumerate(zip(node.args, parts, strict=True))
        )
        return left + operation.latex + (rf"\left({right}\right)" if right.startswith("-") else right)
    return operation.write("latex", rf"\operatorname{{{node.op}}}", parts)


def _bracketed(node: Expr, text: str, least: int) -> str:
    """Return the text, in brackets if it binds less tightly than ``least``."""
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
