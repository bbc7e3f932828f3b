"""Closed forms against thirty-digit quadrature at 51 points (slow: 204), limits and symmetries."""

import math

import mpmath
import pytest
import torch

from unsoft import theory
from unsoft.theory.closed_forms import CLOSED_FORMS

BETAS = [-1e4, -50.0, -3.0, -0.5, -1e-6, 0.0, 1e-6, 0.5, 1.0, 3.0, 20.0, 1e4]
GAMMAS = [1e-8, 1e-4, 1e-2, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0, 20.0, 25.0, 30.0]
# Every gamma with three betas, every beta with four gammas, spread over the grid.
QUICK = {(BETAS[(5 * g + 4 * k) % len(BETAS)], gamma) for g, gamma in enumerate(GAMMAS) for k in range(3)}


def check(name, expected, beta, gamma):
    value = float(theory.sparsity(name, beta, gamma))
    wanted = float(expected)
    assert abs(value - wanted) <= 1e-9, (name, gamma, value, wanted)
    if wanted > 1e-300:  # small values must be right too, not merely small
        assert abs(value / wanted - 1) <= 1e-9, (name, gamma, value, wanted)


def check_against_quadrature(reference, points):
    for beta, gamma in points:
        expected = reference.powers(beta, gamma) | reference.exponentials(beta, gamma)
        for name, value in expected.items():
            check(name, value, beta, gamma)


@pytest.mark.parametrize("beta", BETAS)
def test_closed_forms_agree_with_quadrature(beta, reference):
    points = [point for point in QUICK if point[0] == beta]
    assert len(points) >= 4
    check_against_quadrature(reference, points)


@pytest.mark.slow
@pytest.mark.parametrize("beta", BETAS)
def test_closed_forms_agree_with_quadrature_everywhere(beta, reference):
    check_against_quadrature(reference, [(beta, gamma) for gamma in GAMMAS if (beta, gamma) not in QUICK])


def document_relu2(beta, gamma):
    """The expression printed in Su 2023."""
    b, g = mpmath.mpf(beta), mpmath.mpf(gamma)
    e, rise = mpmath.exp(-(b**2) / (2 * g**2)), mpmath.erf(b / (mpmath.sqrt(2) * g)) + 1
    top = e * (mpmath.sqrt(2) * b * g + mpmath.sqrt(mpmath.pi) / e * (b**2 + g**2) * rise)
    first = 2 * mpmath.sqrt(2) * b * g * e * (b**2 + 5 * g**2)
    second = 2 * mpmath.sqrt(mpmath.pi) * (b**4 + 6 * b**2 * g**2 + 3 * g**4) * rise
    return top / (mpmath.pi ** mpmath.mpf("0.25") * mpmath.sqrt(first + second))


@pytest.mark.parametrize("beta", [-4.0, -1.0, 0.0, 2.0])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 7.0])
def test_relu2_is_the_expression_of_the_document(beta, gamma):
    with mpmath.mp.workdps(60):
        check("relu2", document_relu2(beta, gamma), beta, gamma)


@pytest.mark.parametrize("name", ["softmax", "softmax1", "l2", "exp"])
def test_everything_that_only_rescales_exp_is_exp(name):
    assert theory.sparsity(name, 3.0, [0.0, 2.0]).tolist() == pytest.approx([1.0, math.exp(-2)], rel=1e-15)


@pytest.mark.parametrize("name", ["identity", "cog", "sinh"])
def test_odd_weights_do_not_see_the_sign_of_beta(name):
    beta, gamma = torch.tensor([0.1, 2.0, 30.0]), torch.tensor([0.5, 3.0])[:, None]
    assert torch.equal(theory.sparsity(name, beta, gamma), theory.sparsity(name, -beta, gamma))


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0, 3.0, 10.0])
def test_sinh_of_tiny_logits_is_the_identity(ratio):
    gamma = torch.logspace(-300, -7, 50, dtype=torch.float64)
    result, expected = (theory.sparsity(name, ratio * gamma, gamma) for name in ("sinh", "identity"))
    assert torch.allclose(result, expected, rtol=1e-12)


def test_sinh_is_continuous_where_its_series_ends():
    """The series serves gamma / sqrt(2) < 1e-3; both sides agree with exact moments there."""
    for beta, gamma in ((0.0, 1.4e-3), (1e-3, 1.41e-3), (2e-3, 1.42e-3), (3e-3, 1.5e-3)):
        with mpmath.mp.workdps(50):
            b, g = mpmath.mpf(beta), mpmath.mpf(gamma)
            rise, fall = (mpmath.erf((g + side * b / g) / mpmath.sqrt(2)) for side in (1, -1))
            one = mpmath.exp(g * g / 2) * (mpmath.exp(b) * rise + mpmath.exp(-b) * fall) / 2
            two = (mpmath.exp(2 * g * g) * mpmath.cosh(2 * b) - 1) / 2
            expected = float(one / mpmath.sqrt(two))
        assert float(theory.sparsity("sinh", beta, gamma)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["identity", "relu", "relu2"])
def test_powers_depend_on_the_ratio_alone(name):
    ratio = torch.tensor([-3.0, -0.2, 0.0, 1.0, 8.0])
    for scale in (1e-60, 1.0, 1e60):
        assert torch.allclose(
            theory.sparsity(name, ratio.double() * scale, scale),
            theory.sparsity(name, ratio, 1.0),
            rtol=1e-13,
        )


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_nothing_leaves_the_unit_interval(name):
    beta = torch.cat([-torch.logspace(-300, 300, 61), torch.logspace(-300, 300, 61)]).double()[:, None]
    beta = torch.where(beta.isfinite(), beta, 1e300)
    values = theory.sparsity(name, beta, torch.logspace(-30, 2, 40, dtype=torch.float64))
    assert values.isfinite().all() and (values >= 0).all() and (values <= 1 + 1e-12).all()


@pytest.mark.parametrize(
    ("name", "beta", "limit"),
    [
        ("softmax", 5.0, 1.0),
        ("cog", 0.0, 1.0),
        ("sinh", 0.0, math.sqrt(2 / math.pi)),  # sinh(s) is s near 0
        ("sinh", 2.0, 1.0),
        ("identity", 0.0, math.sqrt(2 / math.pi)),
        ("identity", -2.0, 1.0),
        ("relu", 0.0, 1 / math.sqrt(math.pi)),  # E s+ = 1/sqrt(2 pi), E s+^2 = 1/2
        ("relu", -1.0, 0.0),
        ("relu2", 0.0, 1 / math.sqrt(6)),  # E s+^2 = 1/2, E s+^4 = 3/2
        ("relu2", 1.0, 1.0),
        ("relu2", -1.0, 0.0),
    ],
)
def test_gamma_0_is_the_limit(name, beta, limit):
    assert float(theory.sparsity(name, beta, 0.0)) == pytest.approx(limit, abs=1e-15)


def test_shapes_broadcast_and_results_are_float64():
    result = theory.sparsity("cog", torch.zeros(3, 1), torch.ones(4))
    assert result.shape == (3, 4) and result.dtype == torch.float64
    assert theory.sparsity("cog", 0, 1).shape == ()
    assert theory.sparsity("cog", [], []).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("softmax", 0.0, -1.0), ValueError, "gamma: .*-1"),
        (("softmax", math.nan, 1.0), ValueError, "beta: .*nan"),
        (("softmax", 0.0, math.inf), ValueError, "gamma: .*inf"),
        (("softmax", [0.0, 1.0], [1.0, 2.0, 3.0]), ValueError, r"beta, gamma: shapes \(2,\) and \(3,\)"),
        (("softmax", "zero", 1.0), TypeError, "beta: expected a number"),
        (("cogg", 0.0, 1.0), ValueError, "did you mean 'cog'"),
        ((3, 0.0, 1.0), TypeError, "mechanism: .*int"),
    ],
    ids=str,
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        theory.sparsity(*arguments)
