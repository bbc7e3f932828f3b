"""Floors and sign conditions, checked against S itself on wide grids."""

import math

import pytest
import torch

from unsoft import Formula, theory
from unsoft.theory.closed_forms import CLOSED_FORMS
from unsoft.theory.infinite import IDENTITY_FLOOR, RELU2_FLOOR, RELU_FLOOR

GAMMAS = torch.logspace(-6, 6, 200, dtype=torch.float64)


def test_the_floors_are_what_the_moments_of_a_normal_variable_give():
    assert pytest.approx(math.sqrt(2 / math.pi)) == IDENTITY_FLOOR  # E|e| / sqrt(E e^2)
    assert pytest.approx((1 / math.sqrt(2 * math.pi)) / math.sqrt(1 / 2)) == RELU_FLOOR
    assert pytest.approx((1 / 2) / math.sqrt(3 / 2)) == RELU2_FLOOR


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize("beta", [-2.0, -0.1, 0.0, 0.5, 3.0])
def test_limits_bound_the_whole_curve_and_are_approached(name, beta):
    limits, curve = theory.limits(name, beta), theory.sparsity(name, beta, GAMMAS)
    assert limits.narrow == pytest.approx(float(curve[0]), abs=1e-5)
    assert limits.wide == pytest.approx(float(curve[-1]), abs=1e-5)
    assert (curve >= limits.infimum - 1e-12).all()
    assert float(curve.min()) == pytest.approx(limits.infimum, abs=1e-5)


def test_relu2_focuses_only_if_beta_is_negative():
    assert [theory.can_focus("relu2", beta) for beta in (-5.0, -1e-3, 0.0, 1e-3, 5.0)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert all(
        theory.can_focus(name, beta) for name in ("softmax", "cog", "sinh") for beta in (-3.0, 0.0, 3.0)
    )
    assert not any(theory.can_focus("identity", beta) for beta in (-3.0, 0.0, 3.0))


def test_the_minimum_of_a_formula_is_found_inside_the_range():
    """A plateau on a floor is even if all logits are on the plateau, or all are off it,
    and not in between."""
    formula = Formula("where(abs(s) < 1, 1, 0) + 0.2")
    lowest = theory.minimum(formula, 0.0, gamma=(0.01, 30.0))
    dense = theory.sparsity(formula, 0.0, torch.logspace(-2, math.log10(30), 500, dtype=torch.float64))
    assert lowest.sparsity <= float(dense.min()) + 1e-12
    assert 0.02 < lowest.gamma < 29.0
    assert float(theory.sparsity(formula, 0.0, lowest.gamma)) == pytest.approx(lowest.sparsity, rel=1e-12)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="give n, such as 1024"):
        theory.limits("sigmoid", 0.0)
    with pytest.raises(ValueError, match="did you mean 'relu2'"):
        theory.limits("relu22", 0.0)
    with pytest.raises(ValueError, match="gamma: expected a range"):
        theory.minimum("cog", 0.0, gamma=(2.0, 1.0))
    with pytest.raises(ValueError, match="beta: .*nan"):
        theory.can_focus("relu2", math.nan)
