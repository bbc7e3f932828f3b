"""Confidence intervals against textbook values, and the order of verdicts."""

import math

import pytest
import torch

from unsoft.lab import evidence


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.7062), (5, 2.77645), (11, 2.22814), (31, 2.0423), (121, 1.9799)]
)
def test_student_intervals_have_the_width_of_the_tables(count, quantile):
    values = [float(number) for number in range(count)]
    mean, low, high = evidence.t_interval(values)
    error = torch.tensor(values).double().std().item() / math.sqrt(count)
    assert mean == pytest.approx((count - 1) / 2)
    assert (high - mean) / error == pytest.approx(quantile, rel=1e-4)
    assert mean - low == pytest.approx(high - mean)


def test_the_interval_of_five_draws_covers_the_mean_and_a_percentile_bootstrap_does_not():
    """The bootstrap over all resamples, which the verdicts of studies used to rest on, is too narrow."""
    draws = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0)).double()
    intervals = [evidence.t_interval(row) for row in draws.tolist()]
    covered = sum(one.low < 0 < one.high for one in intervals) / len(intervals)
    assert covered == pytest.approx(0.95, abs=0.02)  # three standard errors of 1,000 draws
    which = torch.cartesian_prod(*[torch.arange(5)] * 5)
    means = draws[:250, which].mean(-1)
    low, high = means.quantile(torch.tensor([0.025, 0.975]).double(), dim=1)
    assert ((low < 0) & (high > 0)).double().mean() < 0.9


def test_intervals_are_clipped_to_what_is_possible():
    assert evidence.t_interval([0.9, 1.0], possible=(0.0, 1.0))[1:] == (pytest.approx(0.315, abs=1e-3), 1.0)
    inside = [0.4, 0.5, 0.6]
    assert evidence.t_interval(inside, possible=(0.0, 1.0)) == evidence.t_interval(inside)


def test_a_mean_with_a_censored_draw_is_a_lower_bound():
    some, none = evidence.censored_mean([1.0, None], 64.0), evidence.censored_mean([1.0, 3.0], 64.0)
    assert str(some) == "≥ 32.5" and some.high == math.inf and none.high < 64.0
    assert str(evidence.censored_mean([64.0], 64.0)) == "≥ 64", "reaching the limit is not getting there"
    assert evidence.censored_mean([1.0, 60.0], 64.0)[1:] == (0.0, 64.0)


def test_an_interval_without_width_is_not_certainty():
    assert str(evidence.t_interval([3.0, 3.0, 3.0])) == "3 (all equal)"
    assert evidence.between(0.1 + 0.2, 0.3) == "all equal", "they differ by rounding"
    assert evidence.between(1.00001, 1.00002) == "1.00001 to 1.00002"


def test_worst_verdict_decides():
    verdicts = [evidence.SUPPORTED, evidence.UNDECIDED, evidence.NOT_SUPPORTED]
    assert evidence.worst(verdicts) == evidence.NOT_SUPPORTED
    assert evidence.worst(verdicts[:2]) == evidence.UNDECIDED
    assert evidence.worst(verdicts[:1]) == evidence.SUPPORTED
    assert evidence.worst([evidence.AT_CEILING, *verdicts[:2]]) == evidence.AT_CEILING
    assert evidence.worst([evidence.AT_CEILING, *verdicts]) == evidence.NOT_SUPPORTED
