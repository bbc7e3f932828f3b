"""The built-in formulas against their definitions and properties stated by hand, and extreme logits."""

import math
import pkgutil
import sys
from importlib import import_module

import pytest
import torch

import unsoft.mechanisms  # noqa: F401  (the package, which unsoft.mechanisms() may hide)
from unsoft.formula import ONE, Formula, Interval, Properties, derivative, evaluate
from unsoft.mechanisms import formulas, resolve
from unsoft.modules import registry
from unsoft.modules.definition import Logits

NAMES = list(formulas())
ROWS = [[0.5], [-2.0, 0.0, 1.5], [3.0, -3.0, 0.25, -0.125], [-8.0, -9.5], [20.0, 19.0, -21.0], [0.0, 0.0]]
EXTREME = [[1e4, 9999.0, 0.0, -1e4], [-1e4, -9999.0], [1e4, 1e4], [-1e4], [1e4], [0.0, -1e4, -1e4]]
PROPERTIES = {
    # |sign(s) exp|s|| is the mass: absolute sum 1; the signs are free;
    # the weight jumps from -1/Z to 1/Z at 0.
    "cog": Properties(signed=True, row_sum=Interval(-1, 1), l1=ONE, continuous=False),
    # Unbounded above; the least value of s sigmoid(s) is -0.278.
    "hstu": Properties(signed=True, needs_length=True),
    # s/n: the sum is the mean logit, anything.
    "identity": Properties(signed=True, needs_length=True),
    # 2-norm 1 and positive: the sum is least (1) for one key alone and most (sqrt(n)) for n equal ones.
    "l2": Properties(signed=False, row_sum=Interval(1, 1, power=0.5), l1=Interval(1, 1, power=0.5)),
    # s^3/sqrt(n): anything.
    "polynomial": Properties(signed=True, needs_length=True),
    # Zero for all s <= 0; grows with s.
    "relu": Properties(signed=False, sparse=True, needs_length=True),
    # Zero for all s <= 0; grows with s.
    "relu2": Properties(signed=False, sparse=True, needs_length=True),
    # Each key between 0 and 1, never 0: the sum is up to n.
    "sigmoid": Properties(signed=False, needs_length=True),
    # |sinh| < cosh.
    "sinh": Properties(signed=True, row_sum=Interval(-1, 1), l1=Interval(high=1)),
    "softmax": Properties(signed=False, row_sum=ONE, l1=ONE),
    # The extra 1 takes its share.
    "softmax1": Properties(signed=False, row_sum=Interval(high=1, open=True), l1=Interval(high=1, open=True)),
    # Zero for s <= 0, and these keys still take their share of the mass.
    "softpick": Properties(signed=False, row_sum=Interval(high=1), l1=Interval(high=1), sparse=True),
    # |weight| = mass, but the extra 1 takes its share.
    "swishmax": Properties(signed=True, row_sum=Interval(-1, 1, open=True), l1=Interval(high=1, open=True)),
    # n weights of at most 1/n.
    "tanh": Properties(signed=True, row_sum=Interval(-1, 1), l1=Interval(high=1), needs_length=True),
}
"""Derived by hand, independently of the analysis."""


def _defined(name, row):
    """The definition that the file of the formula holds, in float64."""
    actual = registry.definition(name)
    actual = actual() if registry.takes_number(name) else actual
    s = torch.tensor(row, dtype=torch.float64)[None, None, None]
    n = torch.full_like(s[..., :1], len(row))
    places = torch.arange(len(row), dtype=torch.float64)
    return actual(
        Logits(s, torch.zeros_like(s), torch.ones_like(s, dtype=torch.bool), n, places[-1:], places)
    )[0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_equals_its_definition(name):
    for row in ROWS:
        actual = resolve(name).row(torch.tensor(row, dtype=torch.float64))
        torch.testing.assert_close(actual, _defined(name, row), rtol=2e-14, atol=1e-16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", EXTREME, ids=str)
def test_extreme_logits_in_float32(name, row):
    formula = resolve(name)
    logits = torch.tensor(row, requires_grad=True)
    weights = formula.row(logits)
    expected = _defined(name, row).float()
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-7)
    (gradient,) = torch.autograd.grad(weights.square().sum(), logits)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", [name for name in NAMES if resolve(name).peak is not None])
def test_no_part_nor_derivative_overflows_in_float32(name):
    formula = resolve(name)
    s = torch.tensor([-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4])
    for other in s:
        m = torch.maximum(evaluate(formula.peak, {"s": s}), evaluate(formula.peak, {"s": other}))
        for part in (formula.weight, formula.mass, formula.offset_mass):
            if part is not None:
                for expr in (
                    part,
                    derivative(part, "s"),
                    derivative(derivative(part, "s"), "s"),
                    derivative(part, "m"),
                ):
                    assert evaluate(expr, {"s": s, "m": m}).isfinite().all(), str(expr)


@pytest.mark.parametrize("name", [name for name in NAMES if resolve(name).peak is not None])
def test_the_peak_does_not_matter(name):
    formula = resolve(name)
    s = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)
    for m in (-1.0, 3.0, 7.5):
        env = {"s": s, "m": torch.tensor(m, dtype=torch.float64)}
        total = evaluate(formula.mass, env).sum()
        if formula.offset_mass is not None:
            total = total + evaluate(formula.offset_mass, {"m": env["m"]})
        if formula.norm is not None:
            total = evaluate(formula.norm, {"z": total})
        torch.testing.assert_close(evaluate(formula.weight, env) / total, formula.row(s), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_analysis_finds_the_properties(name):
    p = resolve(name).properties
    assert p == PROPERTIES.get(name, p)
    assert resolve(name).bias == ("strength" if p.signed else "logit")


@pytest.mark.parametrize("name", NAMES)
def test_promises_are_kept_by_random_rows(name):
    generator = torch.Generator().manual_seed(5)
    p = resolve(name).properties
    for scale in (0.1, 1.0, 10.0):
        weights = resolve(name).row(scale * torch.randn(50, 17, generator=generator, dtype=torch.float64))
        assert p.signed == bool((weights < 0).any())
        for promise, total in ((p.row_sum, weights.sum(-1)), (p.l1, weights.abs().sum(-1))):
            low, high = promise.ends(n=17)
            assert total.min() >= low - 1e-14 and total.max() <= high + 1e-14


@pytest.mark.parametrize("p", [1, 2, 5, 64])
def test_polynomial_powers(p):
    formula = resolve(f"polynomial({p})")
    assert formula.row(torch.tensor([2.0, -1.0], dtype=torch.float64)).tolist() == pytest.approx(
        [2.0**p / math.sqrt(2), (-1) ** p / math.sqrt(2)]
    )
    assert formula.signed == (p % 2 == 1)
    assert formula.name == f"polynomial({p})"


@pytest.mark.parametrize("name", NAMES)
def test_every_file_teaches(name):
    doc = import_module(f"unsoft.mechanisms.{name}").__doc__
    for piece in ("a_j = ", "\nStrengths: ", "\nLimitations: ", "\n>>> "):
        assert piece in doc, piece
    assert doc.startswith(name)
    assert resolve(name).summary
    assert resolve(name).name.startswith(name)


def test_every_formula_has_its_file():
    files = {module.name for module in pkgutil.iter_modules(sys.modules["unsoft.mechanisms"].__path__)}
    assert set(NAMES) <= files


@pytest.mark.parametrize("name", NAMES)
def test_facts_are_what_the_check_finds(name):
    """Built-ins skip the check that every other formula gets; here they get it."""
    stated, actual = (
        resolve(name),
        Formula(**{k: v for k, v in resolve(name).to_dict().items() if k != "bias"}),
    )
    assert (stated.signed, stated.mass_degree, stated.bias) == (
        actual.signed,
        actual.mass_degree,
        actual.bias,
    )
