"""Prints instructions as C++ on scalars or SIMD vectors.

The text relies on a type ``real`` and on functions vexp, vexpm1, vlog, vsqrt, vabs, vsign, vmax, vmin, vtanh,
vsigmoid, vrelu, verf, vpow and vselect(condition, a, b) for it; they and the operators must propagate NaN as
described in :mod:`unsoft.formula.derive`.

>>> operation("exp", ["s - m"]), operation("mul", ["a", "b"]), operation("where", ["c", "a", "b"])
('vexp(s - m)', 'a * b', 'vselect(c, a, b)')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unsoft.formula.derive import derivative
from unsoft.formula.expr import Expr
from unsoft.formula.lower import Operand, lower
from unsoft.formula.order import in_order

if TYPE_CHECKING:
    from unsoft.formula.formula import Formula

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip


def literal(number: float) -> str:
    """A number, exactly.

    >>> literal(0.1), literal(2)
    ('real(0.1)', 'real(2.0)')
    """
    return f"real({float(number)!r})"


def operation(op: str, args: Sequence[str]) -> str:
    """The expression of one instruction on operands that are names, literals or bracketed expressions."""
    if op in INFIX:
        return f"{args[0]} {INFIX[op]} {args[1]}"
    if op == "neg":
        return f"-{args[0]}"
    return f"{'vselect' if op == 'where' else 'v' + op}({', '.join(args)})"


def function(name: str, outputs: Mapping[str, Expr], inputs: Sequence[str]) -> str:
    """A C++ function that computes one or more outputs; several are written through references.

    >>> from unsoft.formula.parse import parse
    >>> print(function("weight", {"weight": parse("exp(s - m)")}, ["s", "m"]))
    inline real weight(real s, real m) {
        const auto _0 = s - m;
        const auto _1 = vexp(_0);
        return _1;
    }
    """
    instructions, results = lower(outputs)
    body = [
        f"const auto {i.target} = {operation(i.op, [_operand(a) for a in i.args])};" for i in instructions
    ]
    arguments = [f"real {name}" for name in inputs]
    if len(results) == 1:
        kind, ending = "real", [f"return {_operand(*results.values())};"]
    else:
        kind, ending = "void", [f"{output} = {_operand(operand)};" for output, operand in results.items()]
        arguments += [f"real& {output}" for output in results]
    lines = "".join(f"\n    {line}" for line in [*body, *ending])
    return f"inline {kind} {name}({', '.join(arguments)}) {{{lines}\n}}"


def formula_source(formula: Formula) -> str:
    """All parts of a formula and the slopes of weight and mass by s, as C++ functions."""
    parts = {
        part: getattr(formula, part)
        for part in ("peak", "weight", "mass", "offset_mass", "norm")
        if getattr(formula, part) is not None
    }
    slopes = {f"{part}_slope": derivative(parts[part], "s") for part in ("weight", "mass") if part in parts}
    functions = []
    for name, expr in (parts | slopes).items():
        of = parts[name.removesuffix("_slope")]
        functions.append(function(name, {name: expr}, in_order(of.symbols)))
    return "\n\n".join(functions) + "\n"


def _operand(operand: Operand) -> str:
    return operand if isinstance(operand, str) else literal(operand)
