"""The built-ins against their papers' definitions in 50 digits, their promises by hand, and extreme logits."""

import math
import pkgutil
import sys
from importlib import import_module

import mpmath
import pytest
import torch

import unsoft.mechanisms  # noqa: F401  (the package, which unsoft.mechanisms() may hide)
from unsoft.formula import Formula, derivative, evaluate
from unsoft.mechanisms import formulas, resolve

NAMES = [
    "cog", "identity", "l2", "polynomial", "relu", "relu2", "sigmoid", "sinh", "softmax", "softmax1", "softpick",
    "swishmax", "tanh",
]  # fmt: skip
exp, mpf = mpmath.exp, mpmath.mpf


def _over(weights, total):
    return [w / total if total else mpf(0) for w in weights]


# Row of logits -> weights, as in the papers: no peak, no care, 50 digits instead.
DEFINITIONS = {
    "cog": lambda s: _over([mpmath.sign(x) * exp(abs(x)) for x in s], sum(exp(abs(x)) for x in s)),
    "identity": lambda s: [x / len(s) for x in s],
    "l2": lambda s: _over([exp(x) for x in s], mpmath.sqrt(sum(exp(x) ** 2 for x in s))),
    "polynomial": lambda s: [x**3 / mpmath.sqrt(len(s)) for x in s],
    "relu": lambda s: [max(x, 0) / mpf(len(s)) for x in s],
    "relu2": lambda s: [max(x, 0) ** 2 / mpf(len(s)) for x in s],
    "sigmoid": lambda s: [1 / (1 + exp(-(x - mpmath.log(len(s))))) for x in s],
    "sinh": lambda s: _over([mpmath.sinh(x) for x in s], sum(mpmath.cosh(x) for x in s)),
    "softmax": lambda s: _over([exp(x) for x in s], sum(exp(x) for x in s)),
    "softmax1": lambda s: _over([exp(x) for x in s], 1 + sum(exp(x) for x in s)),
    "softpick": lambda s: _over([max(exp(x) - 1, 0) for x in s], sum(abs(exp(x) - 1) for x in s)),
    "swishmax": lambda s: _over([x * exp(x) for x in s], 1 + sum(abs(x * exp(x)) for x in s)),
    "tanh": lambda s: [mpmath.tanh(x) / len(s) for x in s],
}
ROWS = [[0.5], [-2.0, 0.0, 1.5], [3.0, -3.0, 0.25, -0.125], [-8.0, -9.5], [20.0, 19.0, -21.0], [0.0, 0.0]]
EXTREME = [[1e4, 9999.0, 0.0, -1e4], [-1e4, -9999.0], [1e4, 1e4], [-1e4], [1e4], [0.0, -1e4, -1e4]]


def _defined(name, row):
    with mpmath.workdps(50):
        return [float(x) for x in DEFINITIONS[name]([mpf(x) for x in row])]


def test_these_are_all():
    assert list(formulas()) == NAMES == sorted(NAMES)
    assert set(DEFINITIONS) == set(PROMISES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_equals_its_definition(name):
    for row in ROWS:
        found = resolve(name).row(torch.tensor(row, dtype=torch.float64))
        torch.testing.assert_close(
            found, torch.tensor(_defined(name, row), dtype=torch.float64), rtol=2e-14, atol=1e-16
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", EXTREME, ids=str)
def test_extreme_logits_in_float32(name, row):
    formula = resolve(name)
    logits = torch.tensor(row, requires_grad=True)
    weights = formula.row(logits)
    expected = torch.tensor(_defined(name, row))
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


# name: (signed, row sum, sum of |a|, sparse, needs length, continuous), by hand:
PROMISES = {
    # |sign(s) exp|s|| is the mass: absolute sum 1; the signs are free; the weight jumps from -1/Z to 1/Z at 0.
    "cog": (True, "in [-1, 1]", "1", False, False, False),
    # s/n: the sum is the mean logit, anything.
    "identity": (True, "free", "free", False, True, True),
    # 2-norm 1 and positive: the sum is least (1) for one key alone and most (sqrt(n)) for n equal ones.
    "l2": (False, "in [1, sqrt(n)]", "in [1, sqrt(n)]", False, False, True),
    # s^3/sqrt(n): anything.
    "polynomial": (True, "free", "free", False, True, True),
    # zero for all s <= 0; grows with s.
    "relu": (False, "free", "free", True, True, True),
    "relu2": (False, "free", "free", True, True, True),
    # each key between 0 and 1, never 0: the sum is up to n.
    "sigmoid": (False, "free", "free", False, True, True),
    # |sinh| < cosh.
    "sinh": (True, "in [-1, 1]", "<= 1", False, False, True),
    "softmax": (False, "1", "1", False, False, True),
    # the extra 1 takes its share.
    "softmax1": (False, "< 1", "< 1", False, False, True),
    # zero for s <= 0, and these keys still take their share of the mass.
    "softpick": (False, "<= 1", "<= 1", True, False, True),
    # |weight| = mass, but the extra 1 takes its share.
    "swishmax": (True, "in (-1, 1)", "< 1", False, False, True),
    # n weights of at most 1/n.
    "tanh": (True, "in [-1, 1]", "<= 1", False, True, True),
}


@pytest.mark.parametrize("name", NAMES)
def test_promises(name):
    p = resolve(name).properties
    assert (p.signed, p.row_sum, p.l1, p.sparse, p.needs_length, p.continuous) == PROMISES[name]
    assert resolve(name).bias == ("strength" if p.signed else "logit")


@pytest.mark.parametrize("name", NAMES)
def test_promises_are_kept_by_random_rows(name):
    generator = torch.Generator().manual_seed(5)
    p = resolve(name).properties
    for scale in (0.1, 1.0, 10.0):
        weights = resolve(name).row(scale * torch.randn(50, 17, generator=generator, dtype=torch.float64))
        assert p.signed == bool((weights < 0).any())
        for promise, total in ((p.row_sum, weights.sum(-1)), (p.l1, weights.abs().sum(-1))):
            low, high = {
                "free": (-math.inf, math.inf),
                "1": (1, 1),
                "< 1": (0, 1),
                "<= 1": (0, 1),
                "in [-1, 1]": (-1, 1),
                "in (-1, 1)": (-1, 1),
                "in [1, sqrt(n)]": (1, math.sqrt(17)),
            }[promise]
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
    for piece in ("a_j = ", "\nCan: ", "\nCannot: ", "\n>>> "):
        assert piece in doc, piece
    assert doc.startswith(name)
    assert resolve(name).summary
    assert resolve(name).name.startswith(name)


def test_every_formula_has_its_file():
    files = {module.name for module in pkgutil.iter_modules(sys.modules["unsoft.mechanisms"].__path__)}
    assert set(NAMES) <= files and set(NAMES) == set(formulas())


@pytest.mark.parametrize("name", NAMES)
def test_facts_are_what_the_check_finds(name):
    """Built-ins skip the check that every other formula gets; here they get it."""
    stated, found = (
        resolve(name),
        Formula(**{k: v for k, v in resolve(name).to_dict().items() if k != "bias"}),
    )
    assert (stated.signed, stated.mass_degree, stated.bias) == (found.signed, found.mass_degree, found.bias)
