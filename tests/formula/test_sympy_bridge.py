"""Conversion from SymPy, and SymPy as an oracle of derivatives."""

import pytest
import sympy
import torch

from tests.formula.sympy_form import to_sympy
from unsoft.errors import FormulaError
from unsoft.formula import Formula, derivative, evaluate, parse
from unsoft.formula.sympy_bridge import from_sympy
from unsoft.mechanisms import formulas

s, m = sympy.symbols("s m", real=True)
n = sympy.Symbol("n", positive=True)
POINT = {"s": 0.83, "m": 1.7, "n": 6.0, "z": 2.4}


def _value(expr):
    return evaluate(expr, {name: torch.tensor(x, dtype=torch.float64) for name, x in POINT.items()}).item()


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (s - m, "s - m"),
        (-s - m, "-m - s"),
        (sympy.exp(s) / n, "exp(s)/n"),
        (sympy.Rational(2, 3) * s, "2*s/3"),
        (sympy.sqrt(n) * s, "sqrt(n)*s"),
        (1 / sympy.sqrt(n), "1/sqrt(n)"),
        (s**-3, "s**(-3)"),
        (sympy.Max(s, 0), "max(s, 0)"),
        (sympy.Min(s, 0), "min(s, 0)"),
        (sympy.Abs(s), "abs(s)"),
        (sympy.sign(s), "sign(s)"),
        (sympy.tanh(s), "tanh(s)"),
        (sympy.erf(s), "erf(s)"),
        (sympy.log(n), "log(n)"),
        (sympy.Float("0.1") * s, "0.1*s"),
        (sympy.pi * s, "3.141592653589793*s"),
        (sympy.Piecewise((s, s > 0), (m, True)), "where(s > 0, s, m)"),
        (sympy.Piecewise((s, s <= 0), (m, s < 1), (n, True)), "where(s <= 0, s, where(s < 1, m, n))"),
        (sympy.Integer(3), "3"),
    ],
)
def test_from_sympy(expression, text):
    assert str(from_sympy(expression)) == text


@pytest.mark.parametrize(
    "expression",
    [
        sympy.gamma(s),
        sympy.I * s,
        sympy.Function("f")(s),
        sympy.Integral(s, s),
        sympy.Piecewise((s, s > 0)),
        sympy.oo,
    ],
)
def test_unsupported_expressions_raise(expression):
    with pytest.raises(FormulaError):
        from_sympy(expression)


@pytest.mark.parametrize("name", formulas())
@pytest.mark.parametrize("part", ["weight", "mass", "peak", "norm"])
def test_every_mechanism_survives_the_round_trip(name, part):
    expr = getattr(formulas()[name], part)
    if expr is not None:
        assert _value(from_sympy(to_sympy(expr))) == pytest.approx(_value(expr), rel=1e-14)


@pytest.mark.parametrize(
    "text", ["sigmoid(s)", "relu(s)", "relu(-s)", "where(s >= m, s, m)", "s**m", "max(s, m, n)"]
)
def test_round_trip(text):
    assert _value(from_sympy(to_sympy(parse(text)))) == pytest.approx(_value(parse(text)), rel=1e-14)


@pytest.mark.parametrize("name", formulas())
def test_our_derivative_is_that_of_sympy(name):
    weight = formulas()[name].weight
    theirs = sympy.diff(to_sympy(weight), s).subs(sympy.DiracDelta(s), 0)
    values = {symbol: POINT[symbol.name] for symbol in theirs.free_symbols}
    assert _value(derivative(weight, "s")) == pytest.approx(float(theirs.subs(values).doit()), rel=1e-12)


def test_a_formula_from_sympy_equals_one_from_text():
    weight = sympy.exp(s - m)
    assert Formula(weight, weight, s) == Formula("exp(s - m)", "exp(s - m)", "s")
    with pytest.raises(FormulaError, match="weight: unknown name 'x'"):
        Formula(sympy.Symbol("x"))
