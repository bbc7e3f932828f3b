"""Streaming weights: exact where nothing is forgotten, close to exact on streams of crowds, bounded, causal,
differentiable.
"""

import pytest
import torch

from unsoft.magnitude.gaussian import System
from unsoft.magnitude.prefix import arrival_weights
from unsoft.magnitude.streaming import Arrival, streamed_weights


def stream(n, crowds, noise, seed=0, systems=2, width=32):
    """Scaled keys of which 30 % are isolated and the others belong to crowds."""
    g = torch.Generator().manual_seed(seed)
    places = torch.randn(systems, crowds, width, generator=g, dtype=torch.float64)
    label = torch.randint(crowds, (systems, n), generator=g)
    keys = places.gather(1, label[..., None].expand(-1, -1, width))
    keys = keys + noise * torch.randn(keys.shape, generator=g, dtype=torch.float64)
    alone = torch.rand(systems, n, generator=g) < 0.3
    keys = torch.where(alone[..., None], torch.randn(keys.shape, generator=g, dtype=torch.float64), keys)
    return keys * (8 / width) ** 0.5, torch.where(alone, -1, label)


def run(x, present=None, centres=48, chunk=64):
    return streamed_weights(System(x, present, 0.1), centres=centres, chunk=chunk)


def exact(x, present=None):
    return arrival_weights(System(x, present, 0.1))


def test_one_chunk_is_exact():
    x, _ = stream(64, 5, 0.1)
    torch.testing.assert_close(run(x), exact(x), rtol=1e-9, atol=1e-9)


def test_centres_that_keep_everything_are_exact():
    """Distinct points, none of them near another: all become centres and nothing moves."""
    x = torch.randn(2, 60, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(
        run(x, centres=60, chunk=20), exact(x), rtol=2e-3, atol=2e-3
    )  # a ridge of 1e-5


@pytest.mark.parametrize("crowds", [6, 16])
def test_streams_of_crowds(crowds):
    x, label = stream(1024, crowds, 0.05)
    ours, true = run(x), exact(x)
    assert ((ours.sigmoid() - true.sigmoid()).abs() <= 0.1).double().mean() >= 0.9
    for b in range(len(x)):
        for crowd in range(crowds):
            members = label[b] == crowd
            assert float(ours[b][members].sum() / true[b][members].sum()) == pytest.approx(1, abs=0.15)


def test_points_near_the_origin_are_points_like_others():
    """Where nothing is remembered yet, nothing resembles a point."""
    x = torch.zeros(1, 130, 4, dtype=torch.float64)
    x[:, 1::2] = 5.0
    torch.testing.assert_close(run(x, chunk=10), exact(x), rtol=1e-2, atol=1e-3)


def test_the_forgotten_still_count():
    """Many keys that are a little alike: each is forgotten, together they matter."""
    x = (
        torch.randn(2, 600, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        * (2 / 32) ** 0.5
    )
    ours, true = run(x), exact(x)
    late = slice(300, None)
    assert (ours - true)[:, late].abs().mean() < 0.5 * (true[:, late] - 1 / 1.1).abs().mean()
    assert ((ours.sigmoid() - true.sigmoid()).abs() <= 0.05).double().mean() >= 0.9


def test_forgetting_nothing_of_a_crowd():
    """One crowd of clones among isolated keys: the n-th clone has weight 1 / (n + eps)."""
    x, _ = stream(512, 1, 0.0)
    clone = torch.arange(512) % 4 == 0
    x[:, clone] = x[:, :1]
    expected = 1 / (torch.arange(1, int(clone.sum()) + 1) + 0.1)
    torch.testing.assert_close(run(x)[0][clone], expected.double(), rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("masked", [False, True])
def test_gradient(masked):
    x, _ = stream(200, 6, 0.1)
    x.requires_grad_()
    present = torch.rand(2, 200, generator=torch.Generator().manual_seed(1)) > 0.2 if masked else None
    upstream = torch.randn(2, 200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def value(y):
        return (run(y, present, centres=16, chunk=40) * upstream).sum()

    (gradient,) = torch.autograd.grad(value(x), x)
    for seed in range(3):
        way = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with torch.no_grad():
            slope = (value(x + 1e-6 * way) - value(x - 1e-6 * way)) / 2e-6
        assert float((gradient * way).sum()) == pytest.approx(float(slope), rel=1e-6)
    if present is not None:
        assert gradient[~present].eq(0).all()


def test_masked_points_are_as_if_absent():
    x, _ = stream(150, 4, 0.1, systems=1)
    present = torch.ones(1, 150, dtype=torch.bool)
    present[:, 60:70] = False
    actual = run(x, present, chunk=150)
    expected = run(x[present][None], chunk=140)
    torch.testing.assert_close(actual[present], expected[0], rtol=1e-9, atol=1e-9)


def test_the_future_is_not_felt():
    x, _ = stream(300, 6, 0.1)
    before = run(x)
    x[:, 200:] = x[:, :100]
    after = run(x)
    assert torch.equal(before[:, :200], after[:, :200]) and not torch.equal(before[:, 200:], after[:, 200:])


@pytest.mark.parametrize("pieces", [[1] * 150, [64, 1, 63, 22], [130, 20]])
def test_in_pieces_with_bounded_state(pieces):
    x, _ = stream(150, 6, 0.1)
    present = torch.rand(2, 150, generator=torch.Generator().manual_seed(1)) > 0.1
    whole = run(x, present)
    arriving, start, actual, sizes = Arrival(48, 64), 0, [], []
    for n in pieces:
        actual.append(arriving.add(System(x[:, start : start + n], present[:, start : start + n], 0.1)))
        start += n
        sizes.append(sum(y.numel() for y in arriving.tensors))
    torch.testing.assert_close(torch.cat(actual, dim=1), whole, rtol=1e-9, atol=1e-9)
    centres, chunk, factor = 48 * (32 + 4 + 48), 64 * (32 + 1 + 48 + 48), 128 * (128 + 1)
    assert max(sizes) <= 2 * (centres + chunk + factor)  # two systems; whatever the length


def test_float32_is_close():
    x, _ = stream(600, 8, 0.05)
    torch.testing.assert_close(run(x.float()).double(), run(x), rtol=0, atol=2e-3)
