"""Expressions of formulas as SymPy expressions: an oracle for values and derivatives."""

import operator

import sympy

from unsoft.formula.expr import bottom_up

FORMS = {
    "neg": operator.neg,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "lt": sympy.Lt,
    "le": sympy.Le,
    "gt": sympy.Gt,
    "ge": sympy.Ge,
    "eq": sympy.Eq,
    "ne": sympy.Ne,
    "where": lambda condition, a, b: sympy.Piecewise((a, condition), (b, True)),
    "abs": sympy.Abs,
    "max": sympy.Max,
    "min": sympy.Min,
    "relu": lambda a: sympy.Max(a, 0),
    "expm1": lambda a: sympy.exp(a) - 1,
    "expdiff": lambda a, b, c: sympy.exp(a - c) - sympy.exp(b - c),
    "log1p": lambda a: sympy.log(1 + a),
    "sigmoid": lambda a: 1 / (1 + sympy.exp(-a)),
    "softplus": lambda a: sympy.log(1 + sympy.exp(a)),
}
"""What SymPy does not have under the name of the operation."""


def to_sympy(expr):
    """Return the SymPy form of an expression; its symbols are real, n positive."""

    def convert(node, operands):
        if node.op == "num":
            return sympy.Integer(node.value) if isinstance(node.value, int) else sympy.Float(node.value)
        if node.op == "sym":
            return sympy.Symbol(node.name, **{"positive" if node.name == "n" else "real": True})
        return (FORMS.get(node.op) or getattr(sympy, node.op))(*operands)

    return bottom_up(expr, convert)
