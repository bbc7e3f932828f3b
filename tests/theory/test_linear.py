"""Linear attention and decay: by the definition on explicit weights, and their bounds."""

import math

import mpmath
import pytest
import torch

from unsoft import theory


def by_definition(weights):
    return float(weights.abs().mean() / weights.square().mean().sqrt())


def test_general_linear_attention_is_exact_for_any_keys():
    generator = torch.Generator().manual_seed(0)
    keys = (
        torch.rand(500, 6, generator=generator, dtype=torch.float64) ** 3
    )  # far from Gaussian, correlated by chance
    query = torch.rand(6, generator=generator, dtype=torch.float64)
    covariance = torch.cov(keys.mT, correction=0)
    result = theory.linear_sparsity(query, keys.mean(0), covariance)
    assert float(result) == pytest.approx(by_definition(keys @ query), rel=1e-13)


def test_independent_features_are_the_general_case():
    query = torch.tensor([[0.5, 2.0, 0.0], [1.0, 1.0, 1.0]])
    general = theory.linear_sparsity(query, torch.full((3,), 0.7), 1.69 * torch.eye(3))
    assert torch.allclose(theory.iid_linear_sparsity(query, 0.7, 1.3), general, rtol=1e-6)


def test_no_query_of_any_dimension_gets_below_the_floor():
    """Su 2023 gives sqrt(d) as the largest |q|_2/|q|_1; it is 1, and the floor does not fall with d."""
    floor = float(theory.iid_linear_floor(0.5, 1.0))
    assert floor == pytest.approx(1 / math.sqrt(5))
    for width in (1, 4, 64, 1024):
        queries = (
            torch.rand(200, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64) ** 8
        )
        one_hot = torch.eye(width, dtype=torch.float64)[:1]
        assert (theory.iid_linear_sparsity(queries, 0.5, 1.0) >= floor - 1e-15).all()
        assert float(theory.iid_linear_sparsity(one_hot, 0.5, 1.0)) == pytest.approx(floor)


@pytest.mark.parametrize("length", [1, 2, 7, 1000])
@pytest.mark.parametrize("decay", [0.1, 0.5, 0.999, 1.0])
def test_decay_is_the_sparsity_of_its_weights(length, decay):
    weights = torch.tensor(decay, dtype=torch.float64) ** torch.arange(length)
    assert float(theory.decay_sparsity(length, decay)) == pytest.approx(by_definition(weights), rel=1e-12)


@pytest.mark.parametrize("gap", [1e-15, 1e-12, 1e-8, 1e-4])
@pytest.mark.parametrize("length", [3, 10**6])
def test_decay_near_1(gap, length):
    decay = 1 - gap
    with mpmath.mp.workdps(60):
        d, n = mpmath.mpf(decay), length
        expected = mpmath.sqrt((1 - d**n) / (n * (1 - d)) * (1 + d) / (1 + d**n))
    assert float(theory.decay_sparsity(length, decay)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("length", [1, 2, 7, 1000])
@pytest.mark.parametrize("decay", [0.01, 0.5, 0.9, 0.999])
def test_decay_bound_of_su(length, decay):
    """S < sqrt(1/n (1 + d) / ((1 - d) (1 + d^n))); S itself is sqrt(1 - d^n) of it."""
    with mpmath.mp.workdps(60):
        d, n = mpmath.mpf(decay), length
        bound = mpmath.sqrt((1 + d) / (n * (1 - d) * (1 + d**n)))
        weights = [d**k for k in range(n)]
        sparsity = mpmath.fsum(weights) / mpmath.sqrt(n * mpmath.fsum(w**2 for w in weights))
        assert sparsity < bound * (1 + mpmath.mpf(10) ** -50)  # d^n may be below all 60 digits
    assert float(theory.decay_bound(length, decay)) == pytest.approx(float(bound), rel=1e-12)
    assert float(sparsity / bound) == pytest.approx(math.sqrt(1 - decay**length), rel=1e-12)


def test_decay_bound_without_decay_is_infinite():
    assert float(theory.decay_bound(5, 1.0)) == math.inf


def test_decay_focuses_with_length():
    values = theory.decay_sparsity([10, 1000, 100000], 0.9)
    assert (values.diff() < 0).all()
    assert float(values[-1]) == pytest.approx(math.sqrt(1.9 / 0.1 / 100000), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.decay_sparsity(3, 0.0), "decay: .* 0"),
        (lambda: theory.decay_sparsity(3, 1.5), "decay: .* 1.5"),
        (lambda: theory.decay_bound(3, 0.0), "decay: .* 0"),
        (lambda: theory.decay_sparsity(0, 0.5), "length: .* 0"),
        (lambda: theory.decay_sparsity(2.5, 0.5), "length: .*whole"),
        (lambda: theory.linear_sparsity([1.0, 2.0], [1.0], [[1.0]]), r"\(2,\), \(1,\) and \(1, 1\)"),
        (lambda: theory.linear_sparsity([1.0], [1.0], [[-1.0]]), "covariance: .*-1"),
        (lambda: theory.iid_linear_sparsity([-1.0, 2.0], 1.0, 1.0), "query: .*-1"),
        (lambda: theory.iid_linear_sparsity(1.0, 1.0, 1.0), "query: .*one number"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_zero_weights_have_sparsity_0():
    assert float(theory.linear_sparsity([0.0, 0.0], [1.0, 1.0], torch.eye(2))) == 0.0
