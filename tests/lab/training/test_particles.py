"""Particles sample what they should: the published facts about SVGD and SPOS,
on distributions that are known exactly."""

import math

import pytest
import torch

from unsoft.lab.training.repulsion import descent


def published(places, gradients, alpha):
    """SVGD as a sum over pairs, in the words of Liu and Wang 2016, in float64."""
    many = len(places)
    squares = [[float((x - y).square().sum()) for y in places] for x in places]
    pairs = torch.tensor([squares[i][j] for i in range(many) for j in range(many) if i != j])
    bandwidth = 0.5 * float(pairs.median()) / math.log(many + 1)
    direction = torch.zeros_like(places)
    for i in range(many):
        for j in range(many):
            near = math.exp(-squares[i][j] / (2 * bandwidth))
            direction[i] += near * gradients[j] - alpha * near * (places[i] - places[j]) / bandwidth
    return direction / many


def test_svgd_is_the_published_sum():
    generator = torch.Generator().manual_seed(0)
    places, gradients = (torch.randn(7, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = published(places, gradients, 0.7)
    assert torch.allclose(descent(places, gradients, "svgd", alpha=0.7), expected)
    push = expected - published(places, gradients, 0.0)
    assert torch.allclose(descent(places, gradients, "repel", alpha=0.7), gradients + push)


def test_spos_adds_its_own_gradient_and_noise():
    generator = torch.Generator().manual_seed(0)
    places, gradients = (torch.randn(4, 20_000, generator=generator) for _ in range(2))
    torch.manual_seed(0)
    direction = descent(places, gradients, "spos", temperature=0.25, step_size=0.01)
    noise = descent(places, gradients, "svgd") + 0.25 * gradients - direction
    assert noise.std().item() == pytest.approx(math.sqrt(2 * 0.25 / 0.01), rel=0.02)
    assert noise.mean().abs() < 0.2


def test_one_particle_follows_its_gradient():
    place, gradient = torch.ones(1, 3), torch.full((1, 3), 2.0)
    for kind in ("svgd", "repel"):
        assert torch.equal(descent(place, gradient, kind), gradient)


def test_the_fixed_point_of_svgd_on_a_gaussian_has_its_mean_and_spread(one_thread):
    torch.manual_seed(0)
    mean, spread = torch.tensor([1.0, -2.0]), torch.tensor([1.0, 0.5])
    places = 5 + 0.1 * torch.randn(60, 2)
    for _ in range(2000):
        places = places - 0.3 * descent(places, (places - mean) / spread**2)
    assert torch.allclose(places.mean(0), mean, atol=0.02)
    assert torch.allclose(places.std(0), spread, rtol=0.08)
    assert descent(places, (places - mean) / spread**2).abs().max() < 0.01


def test_spos_keeps_the_spread_where_svgd_collapses(one_thread):
    """A standard normal in 50 dimensions with 20 particles: SVGD's variance is known to collapse with the
    dimension."""
    torch.manual_seed(0)
    spread = {}
    for kind, step in (("svgd", 0.3), ("spos", 0.05)):
        places, variances = torch.randn(20, 50), []
        for number in range(1000):
            places = places - step * descent(places, places, kind, temperature=1.0, step_size=step)
            if number > 300:
                variances.append(places.var(0).mean())
        spread[kind] = torch.stack(variances).mean().item()
    assert spread["svgd"] < 0.15
    assert 0.85 < spread["spos"] < 1.15


@pytest.mark.parametrize("distance", [1e-6, 0.0])
@pytest.mark.parametrize("kind", ["svgd", "spos", "repel"])
def test_particles_in_one_place_separate(kind, distance):
    torch.manual_seed(0)
    places = torch.ones(4, 30) + distance * torch.randn(4, 30)
    for _ in range(20):
        places = places - 0.05 * descent(places, torch.zeros(4, 30), kind, temperature=1e-12)
    assert torch.pdist(places).min() > 0.1
    assert places.isfinite().all()


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="'svgd', 'spos' or 'repel', not 'svg'"):
        descent(torch.ones(2, 2), torch.ones(2, 2), "svg")
