"""Monte Carlo of the real engines: weights of one query against very many random keys."""

import pytest
import torch

import unsoft
from tests.engines.pairwise import every_other
from unsoft import Formula, theory
from unsoft.mechanisms import formulas
from unsoft.theory.weight import Weight

KEYS, WIDTH = 200_000, 5
MOMENTS = [(0.0, 0.6), (-0.8, 0.5), (1.5, 0.9)]
OWN = {
    "own": Formula("s*exp(0.5*abs(s) - m)", "abs(s)*exp(0.5*abs(s) - m)", "0.5*abs(s)"),
    "threshold": Formula("where(s > c, s - c, 0)/n", params={"c": 0.5}),
}


def sampled(mechanism, beta, gamma, seed):
    """S of one row: q of length gamma, keys N(mu, I) with q . mu = beta."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    query *= gamma / query.norm()
    keys = torch.randn(KEYS, WIDTH, generator=generator, dtype=torch.float64) + beta * query / gamma**2
    _, weights = unsoft.attention(query[None], keys, keys, mechanism, scale=1.0, return_weights=True)
    return float(weights.abs().mean() / weights.square().mean().sqrt())


def relative_error(formula, beta, gamma):
    """Standard error of S from KEYS samples, to first order in the errors of its two means."""
    beta, gamma = torch.tensor([beta, gamma], dtype=torch.float64)
    one, two, three, four = Weight(formula, n=KEYS).log_moments(beta, gamma, (1, 2, 3, 4), None)
    variance = (two - 2 * one).expm1() + (four - 2 * two).expm1() / 4 - (three - one - two).expm1()
    return float((variance / KEYS).sqrt())


@pytest.mark.parametrize(("name", "moments"), every_other([*formulas(), *OWN], MOMENTS))
def test_engines_have_the_sparsity_of_the_theory(name, moments):
    beta, gamma = moments
    mechanism = OWN.get(name, name)
    formula = mechanism if isinstance(mechanism, Formula) else unsoft.mechanisms()[name]
    expected = float(theory.sparsity(formula, beta, gamma, n=KEYS))
    result = sampled(mechanism, beta, gamma, seed=5)
    assert result == pytest.approx(expected, rel=4 * relative_error(formula, beta, gamma))


@pytest.mark.parametrize("name", ["softmax", "identity", "relu", "relu2", "cog", "sinh"])
def test_engines_have_the_sparsity_of_the_closed_forms(name):
    assert sampled(name, -0.4, 0.7, seed=6) == pytest.approx(
        float(theory.sparsity(name, -0.4, 0.7)), rel=0.02
    )


def test_linear_attention_has_the_sparsity_of_its_features():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 1, WIDTH, generator=generator, dtype=torch.float64)
    keys = torch.randn(1, 1, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    module = unsoft.mechanism("linear-relu", heads=1, head_dim=WIDTH).double()
    _, weights = module(query, keys, keys, return_weights=True)
    result = float(weights.mean() / weights.square().mean().sqrt())
    # relu of a standard normal: mean 1/sqrt(2 pi), second moment 1/2
    mean = 1 / (2 * torch.pi) ** 0.5
    expected = theory.iid_linear_sparsity(query.flatten().relu(), mean, (0.5 - mean**2) ** 0.5)
    assert result == pytest.approx(float(expected), rel=0.01)


def test_decay_has_the_sparsity_of_its_powers():
    module = unsoft.mechanism("decay(0.75)", heads=1, head_dim=WIDTH).double()
    x = torch.randn(1, 1, 40, WIDTH, dtype=torch.float64)
    _, weights = module(x, x, x, is_causal=True, return_weights=True)
    row = weights[0, 0, -1]
    result = float(row.abs().mean() / row.square().mean().sqrt())
    decay = float(module.decay().flatten()[0])
    assert result == pytest.approx(float(theory.decay_sparsity(40, decay)), rel=1e-6)
