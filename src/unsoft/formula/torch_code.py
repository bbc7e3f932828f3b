"""Prints formulas as readable torch code, to be copied into other projects. unsoft itself never runs it.

>>> from unsoft.formula.parser import parse
>>> torch_expression(parse("sign(s)*exp(abs(s) - m)"))
'torch.sign(s)*torch.exp(torch.abs(s) - m)'
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from unsoft.formula.expr import Expr, postorder
from unsoft.formula.operation import OPERATIONS
from unsoft.formula.text import infix

if TYPE_CHECKING:
    from unsoft.formula.formula import Formula


def torch_expression(expr: Expr) -> str:
    """Python text of an expression whose symbols are tensors."""
    text: dict[Expr, str] = {}
    for node in postorder(expr):
        text[node] = _write(node, [text[a] for a in node.args])
    return text[expr]


def formula_source(formula: Formula) -> str:
    """A Python function from logits to the weights of each row.

    >>> from unsoft.formula.formula import Formula
    >>> print(formula_source(Formula("exp(s - m)", "exp(s - m)", "s")))
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
        lines.append(f"m = {_bracketed(_per_key(formula.peak))}.amax(-1, keepdim=True)")
    lines.append(f"weight = {_per_key(formula.weight)}")
    if formula.mass is None:
        lines.append("return weight")
    else:
        lines.append(f"total = {_bracketed(_per_key(formula.mass))}.sum(-1, keepdim=True)")
        if formula.offset_mass is not None:
            lines[-1] += f" + {_bracketed(torch_expression(formula.offset_mass))}"
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
    """Text of an expression with one value for each key."""
    text = torch_expression(expr)
    return text if "s" in expr.symbols else f"({text})*torch.ones_like(s)"


def _bracketed(text: str) -> str:
    """The text, in brackets unless it is a name or one call."""
    return text if re.fullmatch(r"[\w.]+(\([^()]*\))?", text) else f"({text})"


def _write(node: Expr, parts: list[str]) -> str:
    if node.op == "num":
        return repr(node.value)
    if node.op == "sym":
        return str(node.name)
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
