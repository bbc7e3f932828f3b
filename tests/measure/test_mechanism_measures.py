"""Measures that run a mechanism: discrimination, gradient, the unique key's share."""

import math

import pytest
import torch

import unsoft
from unsoft import measure
from unsoft.measure.mechanism import _chance_of_less
from unsoft.mechanisms import formulas

FORMULAS = formulas()


def test_auc_counts_pairs():
    low, high = [3.0, 1.0, 2.0, 2.0], [2.0, 5.0, 1.0]
    pairs = [(x < y) + (x == y) / 2 for x in low for y in high]
    assert _chance_of_less(torch.tensor(low), torch.tensor(high)) == pytest.approx(sum(pairs) / len(pairs))


@pytest.mark.parametrize("name", ["relu", "relu2", "softpick"])
def test_weights_cut_at_zero_cannot_be_distinguished(name):
    assert measure.discrimination(FORMULAS[name], spread=0) == (0.5, 0.0)
    # A random direction has a positive logit half the time, and then it gets more than the opposed key's 0.
    assert measure.discrimination(FORMULAS[name]).auc == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("name", ["cog", "sinh", "identity", "polynomial"])
def test_signed_mechanisms_separate_clearly(name):
    result = measure.discrimination(FORMULAS[name])
    assert result.auc > 0.99 and result.gap > 3


def test_softmax_orders_but_has_a_small_gap():
    result = measure.discrimination(FORMULAS["softmax"], spread=0)
    assert result.auc > 0.99
    assert result.gap < 1  # a neutral key has less than a fair share, and a weight cannot go below 0


def test_gap_of_identity_by_quadrature():
    """With one key the row is its own mass: +-1 each, so the gap is 1 - (-1) when irrelevant is positive,
    else 0."""
    result = measure.discrimination(FORMULAS["identity"], keys=1, geometries=20_000)
    assert result.gap == pytest.approx(1.0, abs=0.03)


def test_geometry_has_the_cosines_it_promises():
    """The logit of the opposed key is -opposition |q| |k| / sqrt(dim):
    its mean over chi-distributed lengths."""
    seen = []

    def spy(logits):
        seen.append(logits)
        return logits

    dim = 16
    measure.discrimination(spy, opposition=0.25, dim=dim, keys=3, geometries=50_000)
    irrelevant, opposed = seen
    mean_length = math.sqrt(2) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))
    assert opposed[:, 0].mean().item() == pytest.approx(-0.25 * mean_length**2 / math.sqrt(dim), rel=0.01)
    # q . k / sqrt(d) of independent normal vectors has mean 0 and variance 1.
    for logits in (irrelevant[:, 0], irrelevant[:, 1], opposed[:, 2]):
        assert logits.mean().item() == pytest.approx(0, abs=0.02)
        assert logits.var().item() == pytest.approx(1, abs=0.03)
    assert torch.equal(irrelevant[:, 1:], opposed[:, 1:])


def test_seed_repeats():
    one, same, other = (measure.discrimination(FORMULAS["softmax"], seed=seed) for seed in (1, 1, 2))
    assert one == same and one != other


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"opposition": 1.5}, ValueError, "'opposition' is 1.5; .* between 0 and 1"),
        ({"opposition": math.nan}, ValueError, "'opposition'"),
        ({"spread": -1}, ValueError, "'spread'"),
        ({"keys": 0}, ValueError, "'keys' must be"),
        ({"geometries": 2.0}, TypeError, "'geometries' must be a whole number"),
    ],
)
def test_invalid_geometry_raises(keywords, error, message):
    with pytest.raises(error, match=message):
        measure.discrimination(FORMULAS["softmax"], **keywords)


@pytest.mark.parametrize(
    "run",
    [
        measure.discrimination,
        lambda mechanism: measure.gradient(mechanism, torch.zeros(2), torch.zeros(3)),
        lambda mechanism: measure.unique_share(mechanism, [1, 2]),
    ],
)
def test_other_types_are_no_mechanism(run):
    with pytest.raises(TypeError, match=r"'mechanism' .* not 'cog'; .* unsoft.mechanisms\(\)\['cog'\]"):
        run("cog")
    with pytest.raises(ValueError, match="one weight for each logit"):
        run(lambda logits: logits.sum(-1))
    with pytest.raises(ValueError, match="into float; it must"):
        run(lambda logits: 0.5)


LOGITS = torch.linspace(-5, 5, 6, dtype=torch.float64)  # without 0, where some formulas have a corner
OTHERS = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)


def test_gradient_of_softmax_in_closed_form():
    result = measure.gradient(FORMULAS["softmax"], LOGITS, OTHERS)
    for position, s in enumerate(LOGITS):
        a = torch.cat([s[None], OTHERS]).softmax(-1)
        jacobian = torch.diag(a) - torch.outer(a, a)
        assert result.weight[position].item() == pytest.approx((a[0] * (1 - a[0])).item(), rel=1e-12)
        assert result.key[position].item() == pytest.approx(jacobian[:, 0].norm().item(), rel=1e-12)
        assert result.query[position].item() == pytest.approx(jacobian.norm().item(), rel=1e-12)


@pytest.mark.parametrize("name", ["sigmoid", "sinh", "relu2", "swishmax", "softmax1"])
def test_gradient_by_differences(name):
    result, step = measure.gradient(FORMULAS[name], LOGITS, OTHERS), 1e-6
    for position, s in enumerate(LOGITS):
        row = torch.cat([s[None], OTHERS])
        nudges = torch.eye(4, dtype=torch.float64) * step
        slopes = [(FORMULAS[name].row(row + e) - FORMULAS[name].row(row - e)) / (2 * step) for e in nudges]
        jacobian = torch.stack(slopes, -1)
        torch.testing.assert_close(result.weight[position], jacobian[0, 0].abs(), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(result.key[position], jacobian[:, 0].norm(), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(result.query[position], jacobian.norm(), rtol=1e-6, atol=1e-9)


def test_gradient_is_that_of_a_random_loss():
    """The meaning given in the docstring, by Monte Carlo: values, keys and the loss' slope are drawn at
    random."""
    generator = torch.Generator().manual_seed(0)
    draws, dim, s = 20_000, 8, torch.tensor([-1.0], dtype=torch.float64)
    result = measure.gradient(FORMULAS["softmax"], s, OTHERS)
    row = torch.cat([s, OTHERS])
    a = row.softmax(-1)
    jacobian = torch.diag(a) - torch.outer(a, a)
    value_slopes = torch.randn(draws, 4, dtype=torch.float64, generator=generator)
    logit_slopes = value_slopes @ jacobian
    assert logit_slopes[:, 0].square().mean().sqrt().item() == pytest.approx(result.key.item(), rel=0.02)
    keys = torch.randn(draws, 4, dim, dtype=torch.float64, generator=generator)
    query_slopes = torch.einsum("bj,bjd->bd", logit_slopes, keys) / math.sqrt(dim)
    assert query_slopes.square().sum(-1).mean().sqrt().item() == pytest.approx(result.query.item(), rel=0.02)


def test_gradients_at_negative_logits():
    low = torch.tensor([-8.0], dtype=torch.float64)
    teaches = {
        name: measure.gradient(FORMULAS[name], low, OTHERS).key.item()
        for name in ("softmax", "relu", "identity")
    }
    assert teaches["relu"] == 0
    assert 0 < teaches["softmax"] < 1e-3
    assert teaches["identity"] == pytest.approx(1 / 4)


def test_constant_weights_have_no_gradient():
    for constant in (torch.ones_like, lambda logits: logits.detach(), lambda logits: 0 * logits):
        assert measure.gradient(constant, LOGITS, OTHERS).query.eq(0).all()


def test_gradient_leaves_its_inputs_alone_and_works_under_no_grad():
    logits = LOGITS.clone().requires_grad_()
    with torch.no_grad():
        result = measure.gradient(FORMULAS["sinh"], logits, OTHERS)
    assert logits.grad is None and not result.query.requires_grad


def test_invalid_logits_raise():
    with pytest.raises(ValueError, match="must have one dimension"):
        measure.gradient(FORMULAS["relu"], torch.zeros(2, 2), torch.zeros(3))
    with pytest.raises(TypeError, match="'others' has dtype torch.int64"):
        measure.gradient(FORMULAS["relu"], torch.zeros(2), torch.zeros(3).long())


def test_unique_share_of_the_literature():
    softmax = measure.unique_share(FORMULAS["softmax"], [50])
    assert softmax.item() == pytest.approx(20 / 70)
    assert measure.unique_share(FORMULAS["softmax"], []).shape == (0,)


@pytest.mark.parametrize("clones", [1, 10, 200])
def test_unique_share_in_closed_form(clones):
    unique, clone, n = 2.0, 0.5, clones + 1
    weight = {
        "cog": math.exp,
        "relu2": lambda s: s * s,
        "sinh": math.sinh,
        "sigmoid": lambda s: 1 / (1 + math.exp(math.log(n) - s)),
    }
    for name, w in weight.items():
        result = measure.unique_share(unsoft.mechanisms()[name], [clones], unique=unique, clone=clone)
        assert result.item() == pytest.approx(w(unique) / (w(unique) + clones * w(clone)), rel=1e-12)


def test_invalid_clones_raise():
    with pytest.raises(ValueError, match="'clones' must be .*-1"):
        measure.unique_share(FORMULAS["softmax"], [-1])
