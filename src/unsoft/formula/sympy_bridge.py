"""Conversion from SymPy, which is imported only when it is used.

SymPy rewrites expressions (exp(log(n) - s) becomes n*exp(-s), which overflows), so a formula whose numerical
form matters is better written as text.

>>> import sympy
>>> s = sympy.Symbol("s", real=True)
>>> from_sympy(sympy.sign(s) * sympy.Max(s, 0) ** 2 / 3)
Expr('sign(s)*max(s, 0)**2/3')
"""

from functools import cache
from typing import Any

from unsoft.errors import FormulaError
from unsoft.formula.expr import Expr
from unsoft.formula.operation import FUNCTIONS
from unsoft.formula.parser import reread

_RENAMED = {"Abs": "abs", "Max": "max", "Min": "min"}


def from_sympy(expression: Any) -> Expr:
    """Return the tree of a SymPy expression. Raise FormulaError if it uses something formulas do not have."""
    import sympy  # type: ignore[import-untyped]

    expression = sympy.sympify(expression, strict=True)
    kinds = "Symbol Rational Float NumberSymbol Add Mul Pow Piecewise Rel".split()
    inside = sympy.functions.elementary.piecewise.ExprCondPair, sympy.logic.boolalg.BooleanAtom
    known = (*(getattr(sympy, kind) for kind in kinds), *inside)
    for part in sympy.preorder_traversal(expression):
        name = type(part).__name__
        if not isinstance(part, known) and name not in FUNCTIONS and name not in _RENAMED:
            raise FormulaError(
                f"SymPy's {name} in {expression} has no counterpart in formulas; allowed are + - * / **,"
                f" Abs, Max, Min, Piecewise, comparisons, {', '.join(FUNCTIONS)}"
            )
    return reread(_printer().doprint(expression))


@cache
def _printer() -> Any:
    """Return the printer of SymPy that writes the text of a formula."""
    from sympy import true
    from sympy.printing.precedence import PRECEDENCE  # type: ignore[import-untyped]
    from sympy.printing.str import StrPrinter  # type: ignore[import-untyped]

    class Printer(StrPrinter):  # type: ignore[misc]
        def _print_Float(self, number: Any) -> str:
            return repr(float(number))  # with all digits

        _print_NumberSymbol = _print_Exp1 = _print_Pi = _print_Float

        def _print_Add(self, total: Any, order: Any = None) -> str:
            """Write terms with a minus sign last: s - m, not -m + s."""
            first, *rest = sorted(total.as_ordered_terms(), key=lambda term: term.could_extract_minus_sign())
            text = self._print(first)
            for term in rest:
                sign, size = ("-", -term) if term.could_extract_minus_sign() else ("+", term)
                text += f" {sign} {self.parenthesize(size, PRECEDENCE['Add'])}"
            return str(text)

        def _print_Function(self, call: Any) -> str:
            name = type(call).__name__
            operands = sorted(call.args, key=lambda a: a.is_number)  # max(s, 0), not max(0, s)
            return f"{_RENAMED.get(name, name)}({', '.join(map(self._print, operands))})"

        _print_Abs = _print_Max = _print_Min = _print_Function

        def _print_Relational(self, relation: Any) -> str:
            return f"{self._print(relation.lhs)} {relation.rel_op} {self._print(relation.rhs)}"

        def _print_Piecewise(self, choice: Any) -> str:
            *cases, last = choice.args
            if last.cond is not true:
                raise FormulaError(f"a Piecewise needs a last case with the condition True: {choice}")
            text = self._print(last.expr)
            for case in reversed(cases):
                text = f"where({self._print(case.cond)}, {self._print(case.expr)}, {text})"
            return str(text)

    return Printer()
