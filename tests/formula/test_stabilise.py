"""Formulas as written in papers against mpmath, which needs no stabilising."""

import mpmath as mp
import pytest
import torch

import unsoft
from unsoft import Formula
from unsoft.errors import FormulaError

# Weight, normaliser, and the weight in mpmath.
WRITTEN = [
    ("tanh(s)*exp(abs(s))", "abs", lambda s: mp.tanh(s) * mp.exp(abs(s))),
    ("exp(s)", "sum", mp.exp),
    ("sinh(s)", "square", mp.sinh),
    ("max(exp(s) - 1, 0)", "sum", lambda s: max(mp.expm1(s), 0)),
    ("sigmoid(s)", "sum", lambda s: 1 / (1 + mp.exp(-s))),
    ("log(1 + exp(s))**2", "sum", lambda s: mp.log1p(mp.exp(s)) ** 2),
    ("s/(exp(s) + exp(-s))", "abs", lambda s: s / (mp.exp(s) + mp.exp(-s))),
    ("where(s > 0, exp(s), -exp(-2*s))", "abs", lambda s: mp.exp(s) if s > 0 else -mp.exp(-2 * s)),
    ("sqrt(cosh(s))*2**s", "sum", lambda s: mp.sqrt(mp.cosh(s)) * mp.mpf(2) ** s),
]
TOTAL = {"sum": mp.fsum, "abs": lambda w: mp.fsum(map(abs, w)), "square": lambda w: mp.norm(w, 2)}
ROWS = [
    [-1e4, -9999.25, -9990.0, -9999.0],
    [1e4, 9999.5, -1e4, 3.0],
    [-120.0, -121.5, -119.0, -300.0],
    [0.3, -1.2, 2.0, -0.01],
]


@pytest.mark.parametrize(("weight", "normalise", "true"), WRITTEN, ids=[w for w, _, _ in WRITTEN])
def test_weights_and_slopes_are_those_of_the_text(weight, normalise, true):
    """The slope by logit k of sum_j c_j w_j / Z, in 60 digits by differences and in float64 by autograd."""
    formula, factors = Formula(weight, normalise=normalise), [1.0, -2.0, 0.5, 3.0]
    for row in ROWS:
        logits = torch.tensor(row, dtype=torch.float64, requires_grad=True)
        weights = formula.row(logits)
        (slopes,) = torch.autograd.grad((weights * torch.tensor(factors)).sum(), logits)
        with mp.workdps(60):

            def normalised(at, true=true):
                values = [true(mp.mpf(s)) for s in at]
                total = TOTAL[normalise](values)
                return [w / total if total else mp.mpf(0) for w in values]

            def output(at):
                return mp.fdot(factors, normalised(at))

            step = mp.mpf(10) ** -25
            moved = [[s + step * (j == k) for j, s in enumerate(map(mp.mpf, row))] for k in range(4)]
            lowered = [[s - step * (j == k) for j, s in enumerate(map(mp.mpf, row))] for k in range(4)]
            expected = [float(w) for w in normalised(row)]
            steep = [float((output(a) - output(b)) / (2 * step)) for a, b in zip(moved, lowered, strict=True)]
        torch.testing.assert_close(weights.tolist(), expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(slopes.tolist(), steep, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("engine", ["tiled", "native"])
def test_every_engine_computes_a_derived_formula(engine):
    """More keys than a tile, logits up to some thousands, forward and gradients in float32."""
    formula = Formula("tanh(s)*exp(abs(s))", normalise="abs")
    explicit = Formula("tanh(s)*exp(abs(s) - m)", "abs(tanh(s))*exp(abs(s) - m)", "abs(s)")
    assert formula == explicit
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 300, 64, dtype=torch.float64) for _ in range(3))
    tensors = [(40 * q).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    results = {}
    for name, dtype in (("dense", torch.float64), (engine, torch.float32)):
        own = [x.detach().to(dtype).requires_grad_() for x in tensors]
        y = unsoft.attention(*own, formula, is_causal=True, engine=name)
        results[name] = [y, *torch.autograd.grad(y.sin().sum(), own)]
    for mine, theirs in zip(results[engine], results["dense"], strict=True):
        scale = theirs.abs().max()
        assert mine.isfinite().all() and ((mine - theirs).abs().max() / scale) < 2e-4


def test_a_weight_without_a_normaliser_stays_as_written_or_is_made_finite():
    assert str(Formula("where(s > 0, s, exp(s) - 1)").weight) == "where(s > 0, s, exp(s) - 1)"
    written = Formula("exp(s)/(1 + exp(s))/n")
    s = torch.tensor([-1e4, -2.0, 0.0, 3.0, 1e4], requires_grad=True)
    value = written.row(s)
    torch.testing.assert_close(value, torch.sigmoid(s) / 5)
    torch.testing.assert_close(
        torch.autograd.grad(value.sum(), s)[0], torch.sigmoid(s) * torch.sigmoid(-s) / 5
    )


def test_an_offset_is_scaled_along():
    derived = Formula("exp(s)", normalise="sum", offset_mass=1)
    softmax1 = unsoft.mechanisms()["softmax1"]
    for row in ROWS:
        logits = torch.tensor(row)
        torch.testing.assert_close(derived.row(logits), softmax1.row(logits))


def test_an_offset_of_squares_is_scaled_twice():
    """exp(s) over the root of 4 plus the sum of squares, at logits where it counts and where it does not."""
    formula = Formula("exp(s)", normalise="square", offset_mass=4)
    for shift in (-2.0, 0.0, 3.0):
        logits = torch.tensor([0.5, -1.0, 0.0], dtype=torch.float64) + shift
        expected = logits.exp() / (4 + (2 * logits).exp().sum()).sqrt()
        torch.testing.assert_close(formula.row(logits), expected)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"weight": "exp(s)"}, 'grows like exp\\(s\\) .* normalise="sum"'),
        ({"weight": "exp(s)", "normalise": "count"}, 'grows like exp\\(s\\) .* normalise="sum"'),
        ({"weight": "exp(exp(s))", "normalise": "sum"}, "the exponent grows exponentially itself"),
        ({"weight": "sin(exp(s))", "normalise": "abs"}, "sin of an exponential. What would work: give"),
        ({"weight": "tanh(exp(s))", "normalise": "sum"}, "vanishes at the logit"),
        ({"weight": "sinh(s)", "normalise": "sum"}, 'both signs.*use "abs"'),
        ({"weight": "s - s", "normalise": "abs"}, "is 0 at every logit"),
        ({"weight": "s/(s - s)", "normalise": "abs"}, "divides by zero"),
        ({"weight": "1/s", "normalise": "count"}, "is infinite at the logit 0"),
        ({"weight": "sqrt(s)", "normalise": "abs"}, "is not a number at the logit -0.1.*inside a root"),
        ({"weight": "exp(s)", "mass": "exp(s - m)", "normalise": "sum"}, "derives mass"),
    ],
)
def test_what_cannot_be_stabilised_says_why(arguments, problem):
    with pytest.raises(FormulaError, match=problem):
        Formula(**arguments)


def test_unknown_normalisers_are_suggested():
    with pytest.raises(ValueError, match="did you mean 'sum'"):
        Formula("exp(s)", normalise="summ")
