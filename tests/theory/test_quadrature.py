"""S of any formula against thirty-digit quadrature, the closed forms, and hard cases."""

import math

import mpmath
import pytest
import torch
from mpmath import mp

import unsoft
from unsoft import Formula, theory
from unsoft.formula import parse
from unsoft.mechanisms import formulas
from unsoft.theory.closed_forms import CLOSED_FORMS
from unsoft.theory.quadrature import gauss_legendre
from unsoft.theory.weight import WEIGHTS, kinks, signed_log

BETAS = torch.tensor([-30.0, -4.0, -1.0, -1e-3, 0.0, 0.3, 2.0, 25.0], dtype=torch.float64)[:, None]
GAMMAS = torch.tensor([1e-3, 0.05, 0.4, 1.0, 3.0, 10.0, 30.0], dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(set(WEIGHTS) - {"sigmoid"}))
def test_the_numbers_agree_with_the_closed_forms(name):
    closed, numeric = (
        theory.sparsity(name, BETAS, GAMMAS),
        theory.sparsity(Formula(WEIGHTS[name], normalise="abs"), BETAS, GAMMAS),
    )
    assert torch.allclose(closed, numeric, rtol=1e-10, atol=1e-290)


@pytest.mark.parametrize("name", [name for name in formulas() if name in CLOSED_FORMS])
def test_the_weights_of_the_theory_are_those_of_the_mechanisms(name):
    """The mechanism's own formula, with its peak, mass and offset, gives the closed form of its name."""
    result = theory.sparsity(unsoft.mechanisms()[name], BETAS, GAMMAS)
    assert torch.allclose(result, theory.sparsity(name, BETAS, GAMMAS), rtol=1e-10, atol=1e-290)


def softpick(s):
    return mp.expm1(s) if s > 0 else mp.mpf(0)


def sigmoid(s):
    return 1 / (1 + 100 * mp.exp(-s))


def two_steps(s):
    return mp.mpf(1 if s < -0.7 else 3 if s < 0.4 else 2)


CASES = {
    "tanh": (Formula("tanh(s)/n"), mp.tanh, (0,), None),
    "softpick": (unsoft.mechanisms()["softpick"], softpick, (0,), 1),
    "swishmax": (unsoft.mechanisms()["swishmax"], lambda s: s * mp.exp(s), (0,), 1),
    "cubic": (Formula("s**3/sqrt(n)"), lambda s: s**3, (0,), None),
    "sigmoid": (unsoft.mechanisms()["sigmoid"], sigmoid, (), 1),
    "two steps": (Formula("where(s < -0.7, 1, where(s < 0.4, 3, 2))"), two_steps, (-0.7, 0.4), None),
    "three corners": (
        Formula("max(s - 1, 0) + abs(s + 2) - min(s, 0.5)"),
        lambda s: max(s - 1, 0) + abs(s + 2) - min(s, mp.mpf("0.5")),
        (-2, 0.5, 1),
        None,
    ),
    "bell": (Formula("exp(-s**2)"), lambda s: mp.exp(-s * s), (), None),
}


POINTS = [(0.0, 0.3), (-1.5, 1.0), (0.7, 4.0), (0.3, 30.0)]


@pytest.mark.parametrize(
    ("name", "point"),
    [  # every formula at two points, every point with four formulas; the other half is slow
        pytest.param(name, point, marks=() if (k + turn + 2) % 4 < 2 else pytest.mark.slow)
        for k, name in enumerate(CASES)
        for turn, point in enumerate(POINTS)
    ],
)
def test_any_formula_agrees_with_quadrature(name, point, reference):
    formula, f, corners, slope = CASES[name]
    beta, gamma = point
    modes = ((0, 0), (0, 0)) if slope is None else ((0, slope * gamma), (0, 2 * slope * gamma))
    expected = reference.any(f, beta, gamma, corners, modes)
    assert abs(float(theory.sparsity(formula, beta, gamma, n=100)) - float(expected)) <= 1e-10


def test_wide_logits_do_not_overflow():
    """At gamma = 30 the second moment of exp is e^1800, of exp(3 s) e^16200."""
    result = theory.sparsity(Formula("exp(s)", normalise="sum"), [0.0, 1e5, -1e5], 30.0)
    assert torch.allclose(result.log(), torch.full((3,), -450.0).double(), rtol=1e-10)
    assert torch.allclose(
        theory.sparsity(Formula("exp(3*s)", normalise="sum"), 0.0, 4.0).log(), torch.tensor(-72.0).double()
    )


def test_many_points_are_as_good_as_one():
    gammas = torch.linspace(0.01, 20, 700, dtype=torch.float64)
    many = theory.sparsity(Formula("exp(s)", normalise="sum"), 0.0, gammas)
    assert many.shape == (700,) and torch.allclose(many, torch.exp(-(gammas**2) / 2), rtol=1e-9)


def test_constant_weights_are_even_and_zero_weights_give_zero():
    assert float(theory.sparsity(Formula("1/n"), 0.0, 3.0)) == pytest.approx(1.0, abs=1e-14)
    assert float(theory.sparsity(Formula("max(-abs(s), 0)"), 1.0, 3.0)) == 0.0


def test_a_far_threshold_is_seen_through_underflow():
    """Far below its threshold the sigmoid is an exponential, though its value is 0 in float64."""
    result = theory.sparsity(Formula("sigmoid(s)"), -2000.0, 1.5)
    assert float(result) == pytest.approx(math.exp(-1.125), rel=1e-10)


def test_sigmoid_tends_to_softmax_with_length_and_needs_the_length():
    values = theory.sparsity("sigmoid", 0.0, 1.0, n=1e9)
    assert float(values) == pytest.approx(math.exp(-0.5), rel=1e-6)
    assert float(theory.sparsity("sigmoid", 0.0, 1.0, n=2)) > 0.8
    with pytest.raises(ValueError, match="n: .*number of visible keys"):
        theory.sparsity("sigmoid", 0.0, 1.0)


def test_length_that_only_scales_is_not_required():
    assert torch.equal(
        theory.sparsity(Formula("max(s, 0)**2/n"), 1.0, 2.0),
        theory.sparsity(Formula("max(s, 0)**2"), 1.0, 2.0),
    )


def test_parameters_have_defaults_that_calls_replace():
    scaled = Formula("exp(tau*s - m)", "exp(tau*s - m)", "tau*s", params={"tau": 0.5})
    assert float(theory.sparsity(scaled, 0.0, 2.0)) == pytest.approx(math.exp(-0.5))
    assert float(theory.sparsity(scaled, 0.0, 2.0, params={"tau": 1.5})) == pytest.approx(math.exp(-4.5))
    with pytest.raises(ValueError, match="params: the formula has no tua"):
        theory.sparsity(scaled, 0.0, 2.0, params={"tua": 1.0})
    with pytest.raises(ValueError, match="params: the closed form"):
        theory.sparsity("cog", 0.0, 2.0, params={"tau": 1.0})


@pytest.mark.parametrize(
    ("weight", "beta", "limit"),
    [
        ("exp(s)", 1.0, 1.0),
        ("s", 0.0, math.sqrt(2 / math.pi)),
        ("where(s > 0, 2, 1)", 0.0, 1.5 / math.sqrt(2.5)),
        ("max(exp(s) - 1, 0)", 0.0, 1 / math.sqrt(math.pi)),
        ("max(s - 2, 0)", -1.0, 0.0),
    ],
)
def test_gamma_0_is_the_limit(weight, beta, limit):
    assert float(theory.sparsity(Formula(weight, normalise="abs"), beta, 0.0)) == pytest.approx(
        limit, abs=1e-8
    )


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("sqrt(s)", "not a number at the logit -"),
        ("exp(s**2)", "infinite"),
        ("s*exp(-j)", "position"),
    ],
)
def test_formulas_without_moments_raise(weight, message):
    with pytest.raises(ValueError, match=message):
        theory.sparsity(Formula(weight, normalise="abs"), 0.0, 1.0)


def test_a_logit_that_cannot_occur_does_no_harm():
    assert float(theory.sparsity(Formula("sqrt(s)"), 100.0, 1.0)) == pytest.approx(
        1 - 0.25 * 1e-4 / 2, abs=1e-8
    )


@pytest.mark.parametrize("dim", [3, 4, 10, 200])
@pytest.mark.parametrize("gamma", [0.3, 1.0, 2.5])
def test_keys_on_a_sphere(dim, gamma):
    """E exp(t sqrt(d) u) = 0F1(d/2; t^2 d/4) for the first coordinate u of a random unit vector."""

    def moment(t):
        return mpmath.hyp0f1(mpmath.mpf(dim) / 2, mpmath.mpf(t) ** 2 * dim / 4)

    expected = moment(gamma) / mpmath.sqrt(moment(2 * gamma))
    for mechanism in ("softmax", unsoft.mechanisms()["softmax"]):
        assert float(theory.sparsity(mechanism, 1.0, gamma, dim=dim)) == pytest.approx(
            float(expected), rel=1e-9
        )


def test_many_dimensions_are_gaussian():
    assert float(theory.sparsity("relu2", 0.5, 1.0, dim=10**7)) == pytest.approx(
        float(theory.sparsity("relu2", 0.5, 1.0)), abs=1e-6
    )
    with pytest.raises(ValueError, match="'dim' .*3"):
        theory.sparsity("relu2", 0.5, 1.0, dim=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abs(s)", [0.0]),
        ("exp(s)", []),
        ("s**2 - 4", [-2.0, 2.0]),
        ("max(s, 3) + 5", [3.0]),
        ("where(s*s > 9, 1, 2)", [-3.0, 3.0]),
        ("sign(s - 1e4)*exp(s)", [1e4]),
    ],
)
def test_kinks_are_located(text, expected):
    assert kinks(parse(text), {}).tolist() == pytest.approx(expected, rel=1e-15)


def test_gauss_legendre_integrates_polynomials():
    nodes, weights = gauss_legendre()
    for power in range(2 * len(nodes)):
        exact = 2 / (power + 1) if power % 2 == 0 else 0.0
        assert float((weights * nodes**power).sum()) == pytest.approx(exact, abs=1e-14)


FUNCTIONS = [
    "exp(s)",
    "log(abs(s))",
    "sqrt(abs(s))",
    "abs(s)",
    "sign(s)",
    "tanh(s)",
    "sigmoid(s)",
    "relu(s)",
    "erf(s)",
    "max(s, 1)",
    "min(s, -1)",
    "where(s >= 0.5, s, -3)",
    "where(s < 0.5, s, 7)",
    "where(s <= 0.5, 2, s)",
    "where(s == 0.5, 2, s)",
    "where(s != 0.5, 2, s)",
    "s**3",
    "s**-2",
    "abs(s)**0.5",
    "-s",
    "s/3",
    "(s - 1)/(s + 7)",
    "2**s",
    "exp(s) - exp(-s)",
    "s*s - s",
]


@pytest.mark.parametrize("text", FUNCTIONS)
def test_signed_logarithms_agree_with_plain_evaluation(text):
    from unsoft.formula import evaluate

    s = torch.tensor([-5.0, -1.3, -0.2, 0.5, 1.7, 6.0], dtype=torch.float64)
    result, expected = signed_log(parse(text), {"s": s}), evaluate(parse(text), {"s": s})
    assert torch.allclose(result.sign.expand(6) * result.log.exp(), expected, rtol=1e-13)
    assert torch.allclose(result.plain.expand(6), expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("text", "s", "log", "sign"),
    [
        ("exp(s) - exp(s - 1)", 2000.0, 2000 + math.log(1 - math.exp(-1)), 1),
        ("exp(s) + 1", -2000.0, 0.0, 1),
        ("exp(s)*exp(s)", -2000.0, -4000.0, 1),
        ("exp(s)/exp(2*s)", 2000.0, -2000.0, 1),
        ("exp(s)**0.5", 2000.0, 1000.0, 1),
        ("sqrt(exp(s))", -2000.0, -1000.0, 1),
        ("log(exp(s))", 2000.0, math.log(2000.0), 1),
        ("max(exp(s), exp(2*s))", 2000.0, 4000.0, 1),
        ("min(exp(s), exp(2*s))", -2000.0, -4000.0, 1),
        ("where(exp(s) > exp(s + 1), 1, -exp(s))", 2000.0, 2000.0, -1),
        ("0*exp(s)", 2000.0, -math.inf, 0),
        ("sigmoid(s)", -2000.0, -2000.0, 1),
    ],
)
def test_signed_logarithms_beyond_the_range_of_floats(text, s, log, sign):
    result = signed_log(parse(text), {"s": torch.tensor(s, dtype=torch.float64)})
    assert float(result.log) == pytest.approx(log, rel=1e-14) and float(result.sign) == sign
