"""Conversion from SymPy, which is imported only when it is used.

SymPy rewrites expressions (exp(log(n) - s) becomes n*exp(-s), which overflows), so a formula whose numerical
form matters is better written as text.

>>> import sympy
>>> s = sympy.Symbol("s", real=True)
>>> from_sympy(sympy.sign(s) * sympy.Max(s, 0) ** 2 / 3)
Expr('sign(s)*max(s, 0)**2/3')
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

from unsoft.errors import FormulaError
from unsoft.formula.expr import Expr, make, number, symbol
from unsoft.formula.operation import OPERATIONS

if TYPE_CHECKING:
    import sympy  # type: ignore[import-untyped]


def from_sympy(expression: Any) -> Expr:
    """Return the tree of a SymPy expression. Raise FormulaError if it uses something formulas do not have."""
    import sympy

    expression = sympy.sympify(expression, strict=True)
    name = type(expression).__name__
    args = expression.args
    if isinstance(expression, sympy.Symbol):
        return symbol(expression.name)
    if isinstance(expression, sympy.Rational):
        return number(int(expression.p)) / number(int(expression.q))
    if expression.is_Number or expression.is_NumberSymbol:
        return number(float(expression))
    if isinstance(expression, sympy.Add):
        return _sum(expression)
    if isinstance(expression, sympy.Mul):
        return _product(expression)
    if isinstance(expression, sympy.Pow):
        return _power(*args)
    if isinstance(expression, sympy.Piecewise):
        return _piecewise(expression)
    if name in ("Max", "Min"):
        ordered = sorted(args, key=lambda a: (a.is_number, sympy.default_sort_key(a)))
        return reduce(lambda a, b: make(name.lower(), a, b), map(from_sympy, ordered))
    for operation in OPERATIONS.values():
        if name == operation.sympy_name and len(args) == operation.arity:
            return make(operation.name, *map(from_sympy, args))
    functions = sorted({x.sympy_name for x in OPERATIONS.values() if x.sympy_name and x.symbol is None})
    allowed = f"+ - * / **, sqrt, Max, Min, Piecewise, comparisons, {', '.join(functions)}"
    raise FormulaError(
        f"SymPy's {name} in {expression} has no counterpart in formulas; allowed are {allowed}"
    )


def _sum(expression: sympy.Add) -> Expr:
    terms = sorted(expression.as_ordered_terms(), key=lambda term: term.could_extract_minus_sign())
    total = from_sympy(terms[0])
    for term in terms[1:]:  # those with a minus sign come last: s - m, not -m + s
        negative = term.could_extract_minus_sign()
        total = total - from_sympy(-term) if negative else total + from_sympy(term)
    return total


def _product(expression: sympy.Mul) -> Expr:
    import sympy

    if expression.could_extract_minus_sign():
        return -from_sympy(-expression)
    over: Expr = number(1)
    under: Expr = number(1)
    for factor in expression.as_ordered_factors():
        base, exponent = factor.as_base_exp()
        if isinstance(factor, sympy.Rational):
            over, under = over * number(int(factor.p)), under * number(int(factor.q))
        elif exponent.is_number and exponent.is_negative and not isinstance(factor, sympy.exp):
            under = under * _power(base, -exponent)
        else:
            over = over * from_sympy(factor)
    return over / under


def _power(base: sympy.Expr, exponent: sympy.Expr) -> Expr:
    import sympy

    if base == sympy.E:
        return make("exp", from_sympy(exponent))
    if exponent == sympy.Rational(1, 2):
        return make("sqrt", from_sympy(base))
    if exponent.is_number and exponent.is_negative:
        return 1 / _power(base, -exponent)
    return from_sympy(base) if exponent == 1 else from_sympy(base) ** from_sympy(exponent)


def _piecewise(expression: sympy.Piecewise) -> Expr:
    import sympy

    *cases, last = expression.args
    if last.cond is not sympy.true:
        raise FormulaError(f"a Piecewise needs a last case with the condition True: {expression}")
    value = from_sympy(last.expr)
    for case in reversed(cases):
        value = make("where", from_sympy(case.cond), from_sympy(case.expr), value)
    return value
