"""Derivatives at corners, zeros and saddle points of every operation,
against torch's own autograd on the same expression.

Where the conventions of :mod:`unsoft.formula.derive` are our own (ties of max and min, infinitely steep
functions of abs), the expected number is written out.
"""

import math

import pytest
import torch

from unsoft.formula import evaluate, parse

POINTS = (0.0, -0.0, 5e-324, -1e-310, 1e-30, -1e-30, 1.0, -1.0, 40.0, -40.0)
LIKE_TORCH = {
    "abs(s)**p": lambda s, p: s.abs() ** p,
    "sign(s)*abs(s)**p": lambda s, p: s.sign() * s.abs() ** p,
    "max(s, 0)**p": lambda s, p: s.relu() ** p,
    "(s*s)**p": lambda s, p: (s * s) ** p,
    "abs(s)**(p + 1)": lambda s, p: s.abs() ** (p + 1),
    "p**2*abs(s)**p": lambda s, p: p**2 * s.abs() ** p,
    "exp(p*s)": lambda s, p: (p * s).exp(),
    "expm1(p*s)": lambda s, p: (p * s).exp() - 1,
    "exp(s)**p": lambda s, p: s.exp() ** p,
    "log(1 + p*abs(s))": lambda s, p: (1 + p * s.abs()).log(),
    "sqrt(1 + p*s*s)": lambda s, p: (1 + p * s * s).sqrt(),
    "tanh(p*s)": lambda s, p: (p * s).tanh(),
    "sigmoid(p*s)": lambda s, p: (p * s).sigmoid(),
    "relu(p*s)": lambda s, p: (p * s).relu(),
    "abs(p*s)": lambda s, p: (p * s).abs(),
    "sign(p*s)*p": lambda s, p: (p * s).sign() * p,
    "erf(p*s)": lambda s, p: (p * s).erf(),
    "s/(p + abs(s))": lambda s, p: s / (p + s.abs()),
    "where(s > 0, s**p, p)": lambda s, p: torch.where(s > 0, torch.where(s > 0, s, 1) ** p, p),
}


def gradients(function, point, power):
    s = torch.tensor(point, dtype=torch.float64, requires_grad=True)
    p = torch.tensor(power, dtype=torch.float64, requires_grad=True)
    return [
        x.item()
        for x in torch.autograd.grad(function(s, p), (s, p), allow_unused=True, materialize_grads=True)
    ]


@pytest.mark.parametrize("text", LIKE_TORCH)
def test_slopes_are_those_of_torch(text):
    expr = parse(text, ["s", "p"])
    for power in (1.0, 1.5, 2.0, 3.0):
        for point in POINTS:
            expected = gradients(LIKE_TORCH[text], point, power)
            result = gradients(lambda s, p: evaluate(expr, {"s": s, "p": p}), point, power)
            assert result == pytest.approx(expected, rel=1e-12, abs=1e-300), (point, power)


@pytest.mark.parametrize("power", [0.0, 0.25, 1.0, 1.5, 2.0])
def test_a_power_of_zero_is_flat_in_its_exponent(power):
    expr = parse("s**p", ["s", "p"])
    s = torch.zeros(3, dtype=torch.float64)
    p = torch.tensor(power, dtype=torch.float64, requires_grad=True)
    plain = torch.autograd.grad((s**p).sum(), p)[0].item()
    (result,) = torch.autograd.grad(evaluate(expr, {"s": s, "p": p}).sum(), p)
    assert result.item() == plain == 0.0


def test_a_power_of_exponent_zero_is_flat_in_its_base():
    result = gradients(lambda s, p: evaluate(parse("s**p", ["s", "p"]), {"s": s, "p": p}), 0.0, 0.0)
    assert result == gradients(lambda s, p: s**p, 0.0, 0.0) == [0.0, 0.0]


@pytest.mark.parametrize(
    "text", ["abs(s)**0.5", "sqrt(abs(s))", "sign(s)*sqrt(abs(s))", "abs(s)**p", "abs(s)*log(abs(s) + 1)"]
)
def test_the_slope_of_abs_at_zero_wins_against_an_infinite_one(text):
    """torch multiplies infinity by 0 here; one zero query would make all weights of a model NaN."""
    result = gradients(lambda s, p: evaluate(parse(text, ["s", "p"]), {"s": s, "p": p}), 0.0, 0.5)
    assert result == [0.0, 0.0]
    away = gradients(lambda s, p: evaluate(parse(text, ["s", "p"]), {"s": s, "p": p}), 1e-8, 0.5)
    assert all(math.isfinite(x) for x in away) and away[0] != 0


def test_second_derivatives_pass_the_corner_too():
    expr = parse("abs(s)**p", ["s", "p"])
    s = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)
    p = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(evaluate(expr, {"s": s, "p": p}).sum(), p, create_graph=True)
    second = torch.autograd.grad(first, (s, p))
    log = math.log(2)
    assert second[0].tolist() == pytest.approx([0.0, 4 + 12 * log])  # d/ds s^3 log s = s^2 + 3 s^2 log s
    assert second[1].item() == pytest.approx(8 * log**2)
