"""Confidence intervals against textbook values, and the order of verdicts."""

import math

import pytest
import torch

from unsoft.lab import evidence

VALUES = [1.2, 0.7, 2.4, 1.9, 0.1]


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.706), (5, 2.776), (11, 2.228), (31, 2.0423), (121, 1.9799)]
)
def test_student_intervals_have_the_width_of_the_tables(count, quantile):
    values = [float(number) for number in range(count)]
    mean, low, high = evidence.t_interval(values)
    error = torch.tensor(values).double().std().item() / math.sqrt(count)
    assert mean == pytest.approx((count - 1) / 2)
    assert (high - mean) / error == pytest.approx(quantile, rel=1e-4)
    assert mean - low == pytest.approx(high - mean)


def test_bootstrap_covers_95_percent_of_all_resamples():
    low, high = evidence.bootstrap_interval(VALUES)
    means = torch.cartesian_prod(*[torch.tensor(VALUES).double()] * 5).mean(1)
    expected = means.quantile(torch.tensor([0.025, 0.975]).double())
    assert torch.tensor([low, high]).double().allclose(expected)
    # Means of all resamples of two values are 0, 0.5, 0.5 and 1: both ends lie between neighbours.
    assert evidence.bootstrap_interval([0.0, 1.0]) == pytest.approx((0.0375, 0.9625))
    narrow = evidence.bootstrap_interval(VALUES, 0.5)
    assert low < narrow[0] < narrow[1] < high


def test_many_values_are_resampled_with_a_fixed_seed():
    values = [float(number % 7) for number in range(40)]
    interval = evidence.bootstrap_interval(values)
    evidence._bootstrap.cache_clear()
    assert evidence.bootstrap_interval(values) == interval
    assert interval[0] < sum(values) / 40 < interval[1]


def test_worst_verdict_decides():
    verdicts = [evidence.SUPPORTED, evidence.UNDECIDED, evidence.NOT_SUPPORTED]
    assert evidence.worst(verdicts) == evidence.NOT_SUPPORTED
    assert evidence.worst(verdicts[:2]) == evidence.UNDECIDED
    assert evidence.worst(verdicts[:1]) == evidence.SUPPORTED
