"""Intervals, controls and corrected tests against definitions written out plainly."""

import numpy as np
import pytest
import torch
from scipy import stats

from unsoft.lab.interpret.neurons.statistics import (
    Bootstrap,
    NeuronEstimates,
    above_controls,
    benjamini_hochberg,
    matched_controls,
    student_tail,
)


def test_intervals_cover_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1024, 400, generator=generator)
    result = Bootstrap(1024, seed=1).mean(values)
    covered = ((result.low < 0) & (result.high > 0)).float().mean()
    assert 0.88 < float(covered) < 0.98
    assert float(result.error.mean()) == pytest.approx(1024**-0.5, rel=0.1)


def test_neighbours_that_go_together_widen_the_interval():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(32, 1, generator=generator).repeat_interleave(32, 0)
    alone = blocks[torch.randperm(1024, generator=generator)]
    wide, narrow = (Bootstrap(1024, seed=1).mean(x).error for x in (blocks, alone))
    assert float(wide) > 3 * float(narrow)


def test_a_share_is_one_less_the_ratio_of_means():
    part, whole = torch.rand(200, 3), torch.rand(200, 3) + 1
    result = Bootstrap(200, seed=0).share(part, whole)
    assert torch.allclose(result.value, 1 - part.mean(0) / whole.mean(0))
    assert bool(((result.low < result.value) & (result.value < result.high)).all())


def test_controls_are_alike_eligible_and_not_oneself():
    features = torch.randn(300, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 10.0, 0.1]
    )
    eligible = torch.arange(300) % 10 != 0
    result = matched_controls(features, eligible, 10, seed=3)
    assert result.shape == (300, 10)
    assert bool(eligible[result].all()) and not bool((result == torch.arange(300)[:, None]).any())
    assert all(len(set(row)) == 10 for row in result.tolist())
    scaled = features / features.std(0)
    near = (scaled[result] - scaled[:, None]).norm(dim=-1).mean()
    far = (scaled[torch.randint(300, (300, 10))] - scaled[:, None]).norm(dim=-1).mean()
    assert float(near) < 0.5 * float(far)
    assert not torch.equal(result, matched_controls(features, eligible, 10, seed=4))


@pytest.mark.parametrize("freedom", [11, 49])
def test_students_tail(freedom):
    x = torch.tensor([-3.0, -0.5, 0.0, 1.0, 3.0, 5.0])
    expected = stats.t.sf(x.numpy(), freedom)
    assert student_tail(x, freedom).numpy() == pytest.approx(expected, rel=0.05)


def test_benjamini_hochberg_is_that_of_scipy():
    p = np.random.default_rng(0).uniform(size=200) ** 2
    assert benjamini_hochberg(torch.tensor(p)).numpy() == pytest.approx(stats.false_discovery_control(p))


def test_controls_far_below_do_not_hide_what_is_above():
    """Shares of small effects reach far down; only those above the median say how far up chance reaches."""
    generator = torch.Generator().manual_seed(0)
    value = 0.2 * torch.rand(300, generator=generator) - 0.1
    value[100:150] = -20.0
    value[3] = 1.0
    controls = torch.randint(10, 300, (300, 40), generator=generator)
    test = above_controls(NeuronEstimates(value, value, value, torch.full((300,), 0.01)), controls)
    assert (test["q"] < 0.05).nonzero().flatten().tolist() == [3]


def test_only_what_is_beyond_its_controls_is_found():
    generator = torch.Generator().manual_seed(0)
    value = 0.2 * torch.rand(500, generator=generator) - 0.1
    value[3] = 1.0
    controls = torch.randint(10, 500, (500, 50), generator=generator)
    test = above_controls(NeuronEstimates(value, value, value, torch.full((500,), 0.01)), controls)
    assert (test["q"] < 0.05).nonzero().flatten().tolist() == [3]
    # The same figure with an interval as wide as itself is not.
    unsure = torch.where(torch.arange(500) == 3, 1.0, 0.01)
    assert not bool(
        (above_controls(NeuronEstimates(value, value, value, unsure), controls)["q"] < 0.05).any()
    )
