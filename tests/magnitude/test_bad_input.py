"""Wrong and extreme points: a clear error or a defined result."""

import pytest
import torch

from unsoft.magnitude import effective_count, median_t, prefix_weighting, shares, spread, weighting

K = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("t", [0, -1.0, float("nan"), float("inf"), torch.tensor(-2.0)])
@pytest.mark.parametrize("function", [weighting, prefix_weighting, effective_count, spread])
def test_t(function, t):
    with pytest.raises(
        ValueError, match=f"{'weighting' if function is effective_count else function.__name__}: argument 't'"
    ):
        function(K, t)


@pytest.mark.parametrize("eps", [-1e-3, float("nan"), float("inf")])
@pytest.mark.parametrize("function", [weighting, prefix_weighting])
def test_eps(function, eps):
    with pytest.raises(ValueError, match="argument 'eps' must be finite and at least 0"):
        function(K, 1.0, eps)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.ones(3, 2, dtype=torch.int64),), {}, "points.*int64"),
        (([1.0],), {}, "points.*list"),
        ((torch.ones(3),), {}, r"points.*shape \(3,\)"),
        ((K, "1"), {}, "'t'.*str"),
        ((K, torch.ones(3)), {}, "'t'.*broadcast"),
        ((K, 1.0, "x"), {}, "'eps'.*str"),
        ((K,), {"solver": "lu"}, "solver.*cholesky.*'lu'"),
        ((K,), {"iterations": 3}, "iterations.*'auto'"),
        ((K,), {"solver": "cg", "iterations": 0}, "iterations.*0"),
        ((K,), {"solver": "cg", "rank": 3}, "rank.*'cg'"),
        ((K,), {"tolerance": 2.0}, "tolerance.*2.0"),
        ((K, 1.0, 0.0), {"solver": "lowrank"}, "eps.*lowrank"),
        ((K,), {"mask": torch.ones(3, dtype=torch.bool)}, "mask.*broadcast"),
        ((K,), {"mask": torch.ones(20)}, "mask.*bool.*float32"),
    ],
)
def test_arguments(arguments, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        weighting(*arguments, **options)


def test_nan_is_an_error_unless_masked():
    k = K.clone()
    k[3] = torch.nan
    with pytest.raises(ValueError, match="'points' holds NaN or Inf; mask those"):
        weighting(k)
    there = torch.arange(20) != 3
    expected = weighting(K[there]).weights
    torch.testing.assert_close(weighting(k, mask=there).weights[there], expected)
    assert weighting(k, mask=there).weights[3] == 0
    torch.testing.assert_close(
        prefix_weighting(k, mask=there).newest[there], prefix_weighting(K[there]).newest
    )
    assert spread(k, mask=there) == pytest.approx(float(spread(K[there])), rel=1e-5)


@pytest.mark.parametrize("solver", ["auto", "cholesky", "cg", "pcg", "lowrank"])
def test_few_points(solver):
    nothing = weighting(torch.randn(3, 0, 4), solver=solver)
    assert nothing.weights.shape == (3, 0) and nothing.magnitude.tolist() == [0, 0, 0]
    assert weighting(torch.randn(0, 5, 4), solver=solver).magnitude.shape == (0,)
    assert weighting(torch.randn(1, 4), 1.0, 0.25, solver).weights.item() == pytest.approx(0.8)
    assert weighting(K, solver=solver, mask=torch.zeros(20, dtype=torch.bool)).magnitude == 0


@pytest.mark.parametrize("solver", ["auto", "cholesky", "cg", "pcg", "lowrank"])
def test_identical_points_share(solver):
    w = weighting(torch.full((40, 3), 7.0), 1.0, 0.1, solver).weights
    torch.testing.assert_close(w, torch.full((40,), 1 / 40.1))


@pytest.mark.parametrize("solver", ["auto", "cg", "pcg", "lowrank"])
def test_ten_thousand_identical_points(solver):
    actual = weighting(torch.full((10_000, 3), 7.0), 1.0, 0.1, solver)
    assert actual.magnitude == pytest.approx(10_000 / 10_000.1, rel=1e-3)


def test_identical_points_without_eps_get_the_smallest_weights():
    for solver in ("auto", "cg"):
        torch.testing.assert_close(
            weighting(torch.zeros(40, 3), 1.0, 0.0, solver).weights, torch.full((40,), 1 / 40)
        )


@pytest.mark.parametrize("size", [1e6, 1e15, 1e30])
@pytest.mark.parametrize("solver", ["auto", "cholesky", "cg", "pcg", "lowrank"])
def test_huge_points(solver, size):
    """All are far apart, and clones of huge points are still clones."""
    w = weighting(torch.cat([K, K[:1]]) * size, 1.0, 0.25, solver).weights
    torch.testing.assert_close(w[1:20], torch.full((19,), 0.8))
    torch.testing.assert_close(w[[0, 20]], torch.full((2,), 1 / 2.25))


def test_shares_and_median():
    with pytest.raises(TypeError, match="labels"):
        shares(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match="labels.*broadcast"):
        shares(torch.ones(3), torch.ones(4, dtype=torch.int64))
    assert median_t(torch.zeros(5, 2)) == 1
    with pytest.raises(ValueError, match="median_t: argument 'points' holds NaN"):
        median_t(torch.full((2, 2), torch.nan))
