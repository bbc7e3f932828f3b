"""Every formula by name, with modifiers: the same numbers as its expression gives by other means."""

import math

import mpmath
import pytest
import torch

from unsoft import Formula, theory
from unsoft.mechanisms import formulas
from unsoft.modules.registry import resolve

NAMES = [
    *formulas(),
    "polynomial(2)",
    "logn+cog",
    "logn(64)+tanh",
    "sink+softmax",
    "sink+logn+sinh",
    "logn+softpick",
]
WEIGHTS = {  # independent of unsoft: of the logit, for n = 64
    "tanh": lambda s: mpmath.tanh(s),
    "polynomial(3)": lambda s: s**3,
    "softpick": lambda s: max(mpmath.expm1(s), 0),
    "swishmax": lambda s: s * mpmath.exp(s),
    "sigmoid": lambda s: 1 / (1 + 64 * mpmath.exp(-s)),
    "logn(8)+cog": lambda s: mpmath.sign(s) * mpmath.exp(2 * abs(s)),  # log 64 / log 8 = 2
    "logn(8)+tanh": lambda s: mpmath.tanh(2 * s),
    "sink+softmax": lambda s: mpmath.exp(s),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_function_takes_every_name(name):
    n = 64
    values = theory.sparsity(name, [[-0.5], [0.5]], [0.5, 1.0], n=n)
    assert values.shape == (2, 2) and ((values > 0) & (values <= 1)).all()
    same = theory.sparsity(Formula.from_dict(resolve(name).to_dict()), [[-0.5], [0.5]], [0.5, 1.0], n=n)
    torch.testing.assert_close(values, same, rtol=1e-8, atol=0)
    assert 0 <= float(theory.hijack_share(name, 5)) <= 1
    assert 0 <= float(theory.magnitude_hijack(5, base=name).share) <= 1
    assert theory.empirical_sparsity(name, 0.0, 1.0, n, rows=4).mean > 0
    assert math.isfinite(float(theory.length_correction(name, 0.0, 0.5, n=n)))


@pytest.mark.parametrize("name", WEIGHTS)
def test_sparsity_is_that_of_the_weight(name, reference):
    peak = 2.0 if "exp" in str(resolve(name).weight) else 0.0
    modes = ((-2 * peak, 2 * peak), (-4 * peak, 4 * peak))
    expected = reference.any(WEIGHTS[name], 0.3, 0.8, corners=(0,), modes=modes)
    assert float(theory.sparsity(name, 0.3, 0.8, n=64)) == pytest.approx(float(expected), rel=1e-8)


@pytest.mark.parametrize(
    ("name", "beta", "narrow", "wide"),
    [
        ("tanh", 0.5, 1.0, 1.0),
        ("sigmoid", 0.5, 1.0, math.sqrt(0.5)),  # half of the keys weigh 1
        ("polynomial(3)", 0.0, None, math.sqrt(8 / math.pi / 15)),  # E|e|^3 / sqrt(E e^6)
        ("polynomial(2)", -1.0, 1.0, 1 / math.sqrt(3)),
        ("softpick", 1.0, 1.0, 0.0),
        ("softpick", -1.0, 0.0, 0.0),
        ("swishmax", 1.0, 1.0, 0.0),
        ("logn+relu2", 1.0, 1.0, 1 / math.sqrt(6)),
        ("sink+softmax", 1.0, 1.0, 0.0),
    ],
)
def test_limits_of_formulas_without_closed_form(name, beta, narrow, wide):
    result = theory.limits(name, beta, n=64)
    assert narrow is None or result.narrow == pytest.approx(narrow, abs=1e-6)
    assert result.wide == pytest.approx(wide, abs=1e-6)
    assert result.infimum <= min(result.narrow, result.wide)
    assert (result.infimum == 0.0) == (0.0 in (result.narrow, result.wide))


@pytest.mark.parametrize(("name", "focuses"), [("tanh", False), ("softpick", True), ("sink+softmax", True)])
def test_a_formula_without_closed_form_can_focus(name, focuses):
    assert theory.can_focus(name, 1.0, n=64) is focuses


def test_the_number_of_keys_is_required_where_it_matters():
    for name in ("sigmoid", "logn+cog", "logn+tanh"):
        with pytest.raises(ValueError, match="give n, such as 1024"):
            theory.sparsity(name, 0.0, 1.0)
    torch.testing.assert_close(theory.sparsity("tanh", 0.0, 1.0), theory.sparsity("tanh", 0.0, 1.0, n=99))
    assert theory.sparsity("logn(16)+tanh", 0.0, 1.0, n=256) == pytest.approx(
        float(theory.sparsity("tanh", 0.0, 2.0)), rel=1e-9
    )


def test_mechanisms_that_are_no_formula_raise():
    with pytest.raises(ValueError, match="'gpam' is not a formula"):
        theory.sparsity("gpam", 0.0, 1.0)
    with pytest.raises(ValueError, match="did you mean 'tanh'"):
        theory.can_focus("tan", 0.0)
    with pytest.raises(TypeError, match="a name or a Formula, not int"):
        theory.hijack_share(3, 1)
