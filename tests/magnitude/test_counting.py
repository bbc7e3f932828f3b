"""Magnitude as a count: its laws, and its relatives."""

import pytest
import torch

from unsoft.magnitude import effective_count, median_t, shares, spread, weighting


def test_bounds_and_limits():
    k = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = [float(effective_count(k, t, 1e-6)) for t in (1e-9, 0.1, 1.0, 10.0, 1e4)]
    assert (
        counts == sorted(counts)
        and counts[0] == pytest.approx(1, abs=0.05)
        and counts[-1] == pytest.approx(30, rel=1e-5)
    )


def test_additive_over_sets_that_are_far_apart():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, 3, generator=g), torch.randn(25, 3, generator=g) + 1e3
    whole = effective_count(torch.cat([a, b]))
    assert float(whole) == pytest.approx(float(effective_count(a) + effective_count(b)), rel=1e-5)


def test_clones_count_once_for_magnitude_and_less_exactly_for_spread():
    g = torch.Generator().manual_seed(0)
    distinct = torch.randn(5, 3, generator=g)
    crowd = torch.cat([distinct, distinct[:1].expand(50, 3)])
    assert float(effective_count(crowd, 1.0, 1e-4)) == pytest.approx(
        float(effective_count(distinct, 1.0, 1e-4)), rel=1e-3
    )
    z = torch.exp(-torch.cdist(crowd, crowd).square() / 3)
    assert float(spread(crowd)) == pytest.approx(float((1 / z.sum(-1)).sum()), rel=1e-5)


def test_shares_of_groups():
    points = torch.tensor([[0.0], [0.0], [0.0], [90.0], [200.0]])
    actual = shares(weighting(points, 1.0, 1e-6).weights, torch.tensor([0, 0, 0, 1, -1]))
    torch.testing.assert_close(actual, torch.tensor([1 / 3, 1 / 3]), rtol=1e-4, atol=0)
    batch = shares(torch.ones(2, 4), torch.tensor([0, 0, 1, 1]), groups=3)
    assert batch.tolist() == [[0.5, 0.5, 0.0]] * 2


def test_median_t_is_the_definition():
    k = torch.randn(2, 31, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for b in range(2):
        squares = [float((k[b, i] - k[b, j]).square().sum()) for i in range(31) for j in range(i)]
        middle = sorted(squares)[(len(squares) - 1) // 2]
        assert float(median_t(k)[b]) == pytest.approx(6 / middle, rel=1e-9)
    there = torch.arange(31) < 20
    torch.testing.assert_close(median_t(k, mask=there), median_t(k[:, :20]))
