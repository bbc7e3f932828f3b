"""Rows of finite length, spheres of finite dimension, ranks, and random features."""

import math

import pytest
import torch

import unsoft
from unsoft import Formula, theory
from unsoft.theory.finite import row_sparsity


def test_row_sparsity_is_its_definition():
    rows = torch.randn(7, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = rows.abs().mean(-1) / rows.square().mean(-1).sqrt()
    assert torch.allclose(row_sparsity(rows.abs().log()), expected, rtol=1e-13)
    assert float(row_sparsity(torch.full((4,), -math.inf))) == 0.0
    assert float(row_sparsity(torch.full((4,), 1e4))) == 1.0


@pytest.mark.parametrize(
    ("name", "beta", "gamma", "n"),
    [("identity", 0.5, 1.0, 200), ("relu2", -0.3, 1.0, 1000), ("cog", 0.2, 0.5, 200)],
)
def test_the_correction_predicts_short_rows(name, beta, gamma, n):
    """The 1/n term explains the gap to S; without it the same rows are many standard errors away."""
    result = theory.empirical_sparsity(name, beta, gamma, n, rows=8_000_000 // n, seed=1)
    limit, c = float(theory.sparsity(name, beta, gamma)), float(theory.length_correction(name, beta, gamma))
    assert abs(result.mean - limit * (1 + c / n)) < 4 * result.error + 3 * c**2 * limit / n**2
    assert abs(result.mean - limit) > 8 * result.error


def test_the_correction_of_softmax_is_that_of_lognormal_moments():
    gamma = torch.tensor([0.1, 1.0, 2.0], dtype=torch.float64)
    expected = 3 / 8 * torch.expm1(4 * gamma**2) - torch.expm1(2 * gamma**2) / 2
    assert torch.allclose(theory.length_correction("softmax", 7.0, gamma), expected, rtol=1e-10)


def test_errors_are_standard_errors():
    """Means of independent samples scatter as their errors say."""
    runs = [theory.empirical_sparsity("softmax", 0.0, 0.7, 64, rows=200, seed=seed) for seed in range(60)]
    means = torch.tensor([run.mean for run in runs], dtype=torch.float64)
    assert 0.7 < float(means.std()) / (sum(run.error for run in runs) / 60) < 1.4


def test_beyond_the_widest_spread_softmax_stays_above_its_limit():
    n = 1024
    edge = float(theory.widest_spread(n))
    assert edge == pytest.approx(math.sqrt(math.log(n) / 2))
    near = theory.empirical_sparsity("softmax", 0.0, edge / 2, n, rows=400)
    far = theory.empirical_sparsity("softmax", 0.0, 3 * edge, n, rows=400)
    assert near.mean == pytest.approx(math.exp(-((edge / 2) ** 2) / 2), rel=0.03)
    assert far.mean > 1 / math.sqrt(n) > 100 * math.exp(-((3 * edge) ** 2) / 2)


@pytest.mark.parametrize("dim", [3, 8, 64])
def test_samples_on_a_sphere_agree_with_quadrature(dim):
    result = theory.empirical_sparsity("softmax", 0.0, 1.0, 4096, rows=100, dim=dim)
    assert result.mean == pytest.approx(float(theory.sparsity("softmax", 0.0, 1.0, dim=dim)), rel=0.01)


def test_samples_repeat_by_seed_and_use_their_own_length():
    one, again, other = (
        theory.empirical_sparsity("sigmoid", 0.0, 1.0, 50, rows=20, seed=s) for s in (1, 1, 2)
    )
    assert one == again != other
    short = theory.empirical_sparsity("sigmoid", 0.0, 1.0, 50, rows=20, seed=1, n=1e9)
    assert short.mean < one.mean  # sigmoid far below its threshold is an exponential, near it is flatter


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("cog", 0.0, 1.0, 0), ValueError, "'length' .*0"),
        (("cog", 0.0, 1.0, 2.5), TypeError, "'length' .*2.5"),
        (("cog", [0.0, 1.0], 1.0, 5), ValueError, "one number each"),
        (("cog", 0.0, -1.0, 5), ValueError, "gamma"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        theory.empirical_sparsity(*arguments)
    with pytest.raises(ValueError, match="rows"):
        theory.empirical_sparsity("cog", 0.0, 1.0, 5, rows=0)


@pytest.mark.parametrize("width", [1, 2, 16])
def test_a_causal_linear_attention_matrix_has_full_rank(width):
    q, k = torch.rand(2, 40, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    result = theory.ranks(q, k)
    assert (result.length, result.full, result.causal) == (40, width, 40)
    assert 0 < result.smallest < 1 and 1 <= result.effective <= 40


def test_the_real_linear_attention_has_that_rank_too():
    q, k = (
        torch.randn(1, 1, 48, 8, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
        for s in (0, 1)
    )
    module = unsoft.mechanism("linear-elu1", heads=1, head_dim=8).double()
    full = module(q, k, k, return_weights=True)[1][0, 0]
    causal = module(q, k, k, is_causal=True, return_weights=True)[1][0, 0]
    assert int(torch.linalg.matrix_rank(full)) <= 8
    assert int(torch.linalg.matrix_rank(causal)) == 48
    elu1 = (torch.nn.functional.elu(x[0, 0]) + 1 for x in (q, k))
    assert theory.ranks(*elu1)[:3] == (48, 8, 48)


def test_a_zero_on_the_diagonal_costs_rank():
    q, k = torch.ones(2, 5, 1, dtype=torch.float64)
    k = k.clone()
    k[4] = 0.0
    assert theory.ranks(q, k).causal == 4
    with pytest.raises(ValueError, match="query_features"):
        theory.ranks(q, torch.ones(3, 1))


def performer(query, count, seed, sigma):
    directions = torch.randn(
        count, len(query), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return theory.performer_sparsity(query, directions, 0.0, sigma)


def test_random_features_fall_towards_softmax():
    """S comes down as features are added and stops at softmax's: slowly,
    and in reach for small queries only."""
    query = torch.tensor([3.0, 0.0], dtype=torch.float64)
    limit = float(theory.sparsity("softmax", 0.0, 3.0 * 0.5))
    means = torch.tensor(
        [
            sum(float(performer(query, count, seed, 0.5)) for seed in range(20)) / 20
            for count in (1, 8, 64, 512)
        ]
    )
    assert (means.diff() < -0.02).all() and (means > limit).all()
    small = query / 3
    assert float(performer(small, 4000, 0, 0.5)) == pytest.approx(
        float(theory.sparsity("softmax", 0.0, 0.5)), rel=0.02
    )


def test_random_features_by_sampling_keys():
    generator = torch.Generator().manual_seed(3)
    query, directions = (
        torch.tensor([0.5, -0.2, 0.3]).double(),
        torch.randn(10, 3, generator=generator).double(),
    )
    mean, sigma = torch.tensor([0.3, 0.0, -0.4]).double(), 0.8
    keys = mean + sigma * torch.randn(400_000, 3, generator=generator, dtype=torch.float64)
    weights = torch.exp(directions @ query)[None] * torch.exp(
        keys @ directions.mT - keys.square().sum(-1, keepdim=True) / 2
    )
    a = weights.sum(-1)
    expected = a.mean() / a.square().mean().sqrt()
    assert float(theory.performer_sparsity(query, directions, mean, sigma)) == pytest.approx(
        float(expected), rel=0.005
    )
    with pytest.raises(ValueError, match=r"\(D,\) and \(m, D\)"):
        theory.performer_sparsity(query, directions[:, :2])


def test_the_real_performer_has_that_sparsity():
    """The module scales q and k by D^(-1/4) each, which is part of sigma and of the query here."""
    width, count = 4, 32
    generator = torch.Generator().manual_seed(0)
    module = unsoft.mechanism(f"performer({count})", heads=1, head_dim=width).double()
    query = torch.randn(1, 1, 1, width, generator=generator, dtype=torch.float64)
    keys = torch.randn(1, 1, 200_000, width, generator=generator, dtype=torch.float64)
    _, weights = module(query, keys, keys, return_weights=True)
    scale = width**-0.25
    expected = theory.performer_sparsity(query.flatten() * scale, module.directions, 0.0, scale)
    assert float(weights.mean() / weights.square().mean().sqrt()) == pytest.approx(float(expected), rel=0.005)


def test_own_formulas_and_decaying_ones():
    decaying = Formula("exp(-j)*s")
    with pytest.raises(ValueError, match="position"):
        theory.empirical_sparsity(decaying, 0.0, 1.0, 5)
