"""Derivatives against 50-digit numerical differentiation, and the conventions at corners."""

import math

import mpmath
import pytest
import torch

from unsoft.formula import derivative, evaluate, parse
from unsoft.mechanisms import formulas

EXPRESSIONS = [
    "s + m",
    "s - m",
    "m - s",
    "s*m",
    "s/m",
    "m/s",
    "-s",
    "s**2",
    "s**3",
    "s**-2",
    "s**7",
    "s**0.5",
    "s**m",
    "2**s",
    "m**s",
    "exp(s)",
    "exp(-s*s)",
    "expdiff(s, m, 1)",
    "expdiff(s, s*s, s*m)",
    "expm1(s*m)",
    "log(s)",
    "sqrt(s)",
    "abs(s - 2)",
    "abs(2 - s)",
    "sign(s)*s",
    "tanh(s)",
    "sigmoid(s)",
    "sigmoid(3 - 2*s)",
    "relu(s - 1)",
    "relu(1 - s)",
    "erf(s)",
    "erf(2 - s)",
    "max(s, m)",
    "max(m, s)",
    "min(s, m)",
    "min(m, s)",
    "max(s, m, 1)**2",
    "where(s > m, s**2, exp(s))",
    "where(s < m, s**2, exp(s))",
    "where(s >= m, 1, s)",
    "where(s <= m, s, 2)",
    "where(s == m, 1, s*s)",
    "where(s != m, s*s, 1)",
    "exp(s - m)*(s - m)/(1 + exp(s))",
    "log(1 + exp(-abs(s)))",
    "tanh(sqrt(s))**2/m",
    "(s*m)/(s + m)",
    "exp(sigmoid(s)*erf(m))",
    "1/(1 + exp(log(m) - s))",
]
POINTS = [{"s": 0.37, "m": 1.21}, {"s": 1.9, "m": 0.43}, {"s": 2.83, "m": 2.1}]


@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("symbol", ["s", "m"])
@pytest.mark.parametrize("order", [1, 2])
def test_agrees_with_numerical_differentiation(text, symbol, order, exact):
    expr = parse(text)
    slope = derivative(expr, symbol)
    if order == 2:
        slope = derivative(slope, symbol)
    for point in POINTS:
        expected = mpmath.diff(lambda x, p=point: exact(expr, p | {symbol: x}), point[symbol], order)
        # mpmath's own step is about 1e-17 at 50 digits
        assert abs(exact(slope, point) - expected) <= 1e-12 * (1 + abs(expected)), str(slope)
        value = evaluate(
            slope, {name: torch.tensor(x, dtype=torch.float64) for name, x in point.items()}
        ).item()
        assert value == pytest.approx(float(expected), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("name", formulas())
@pytest.mark.parametrize("part", ["weight", "mass", "peak", "offset_mass", "norm"])
def test_every_part_of_every_mechanism(name, part, exact):
    expr = getattr(formulas()[name], part)
    for symbol in () if expr is None else sorted(expr.symbols):
        slope = derivative(expr, symbol)
        for logit in (-2.3, -0.4, 0.6, 3.1):
            point = {"s": logit, "m": 3.4, "n": 7.0, "z": 2.2}
            expected = mpmath.diff(lambda x, p=point, name=symbol: exact(expr, p | {name: x}), point[symbol])
            assert abs(exact(slope, point) - expected) <= 1e-12 * (1 + abs(expected))


@pytest.mark.parametrize(
    ("text", "s", "expected"),
    [
        ("relu(s)", 0.0, 0.0),
        ("abs(s)", 0.0, 0.0),
        ("sign(s)", 0.0, 0.0),
        ("sign(s)", 2.0, 0.0),
        ("max(2*s, s)", 0.0, 1.0),  # a tie takes the second argument
        ("max(s, 2*s)", 0.0, 2.0),
        ("min(2*s, s)", 0.0, 1.0),
        ("min(s, 2*s)", 0.0, 2.0),
        ("max(s, 0)", 0.0, 0.0),
        ("max(0, s)", 0.0, 1.0),
        ("where(s > 0, 2*s, 3*s)", 0.0, 3.0),
        # The branch that is not chosen would give NaN or infinity.
        ("where(s > 0, log(s), 5*s)", -1.0, 5.0),
        ("where(s > 0, sqrt(s), 0)", 0.0, 0.0),
        ("where(s > 0, 1/s, s)", 0.0, 1.0),
        ("where(s < 10, s, exp(s))", 1000.0, math.inf),
        ("where(s > 10, s, exp(s))", 1000.0, 1.0),
        ("sqrt(max(s, 0))", -1.0, 0.0),
        ("sqrt(relu(s))", 0.0, 0.0),
        ("log(max(s, 0))", -1.0, 0.0),
        ("max(s, 0)**1.5", 0.0, 0.0),
        ("max(s, 0)**-1", -1.0, 0.0),
        ("1/max(s, 0)", -1.0, 0.0),
        ("exp(min(s, 5))", 1000.0, 0.0),
    ],
)
def test_conventions_at_corners(text, s, expected):
    value = torch.tensor(s, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(evaluate(parse(text), {"s": value}), value)
    assert gradient.item() == expected
    assert evaluate(derivative(parse(text), "s"), {"s": value.detach()}).item() == expected


def test_a_constant_has_slope_zero():
    assert derivative(parse("n*exp(m)"), "s").constant == 0
    assert derivative(parse("3"), "s").constant == 0


def test_powers_at_the_limit_can_be_differentiated():
    assert str(derivative(parse("s**-64"), "s")) == "-64*s**(-65)"


def test_a_long_sum_is_no_deep_recursion():
    assert derivative(parse("+".join(["s*s"] * 450)), "s").symbols == {"s"}
