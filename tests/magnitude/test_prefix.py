"""The weights of every prefix, against as many separate solves; arrival; growing; the future."""

import pytest
import torch

from unsoft.errors import SolverError
from unsoft.magnitude import prefix_weighting
from unsoft.magnitude.gaussian import System
from unsoft.magnitude.points import checked_points
from unsoft.magnitude.prefix import arrival_weights
from unsoft.magnitude.streaming import Arrival


def separate_solves(a, b):
    n = a.shape[-1]
    table = torch.zeros_like(a)
    for i in range(n):
        table[..., i, : i + 1] = torch.linalg.solve(a[..., : i + 1, : i + 1], b[..., : i + 1, None])[..., 0]
    return table


def test_every_prefix(system, keys, mask):
    t = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    expected = separate_solves(*system(keys, t, 0.1, mask))
    actual = prefix_weighting(keys, t, 0.1, mask=mask)
    torch.testing.assert_close(actual.weights, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(actual.magnitude, expected.sum(-1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(actual.newest, expected.diagonal(dim1=-2, dim2=-1), rtol=1e-10, atol=1e-10)


def test_gradients(system, keys, mask):
    """Against autograd through a dense Cholesky factorisation."""
    g = torch.Generator().manual_seed(2)
    upstream = [torch.randn(s, generator=g, dtype=torch.float64) for s in ((90, 90), (90,), (90,))]

    def results(k, t):
        a, b = system(k, t, 0.1, mask)
        factor = torch.linalg.cholesky(a)
        y = torch.linalg.solve_triangular(factor, b[..., None], upper=False)[..., 0]
        inverse = torch.linalg.solve_triangular(
            factor, torch.eye(90, dtype=k.dtype).expand_as(a), upper=False
        )
        newest = y / factor.diagonal(dim1=-2, dim2=-1)
        return (y[..., None] * inverse).cumsum(-2), y.square().cumsum(-1), newest

    k, t = keys.clone().requires_grad_(), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64).requires_grad_()
    ours, theirs = prefix_weighting(k, t, 0.1, mask=mask), results(k, t)
    checked = checked_points(k, t, mask, "test")
    arrival = checked.shaped(arrival_weights(checked.system(0.1)))
    for number, u in enumerate(upstream):
        a, b = (torch.autograd.grad((r[number] * u).sum(), (k, t), retain_graph=True) for r in (ours, theirs))
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9 * float(y.abs().max()))
    special = torch.autograd.grad((arrival * upstream[2]).sum(), (k, t))
    for x, y in zip(special, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9 * float(y.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_future_is_not_felt(dtype):
    k = torch.randn(2, 150, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    before = prefix_weighting(k, 1.0, 0.1)
    k[:, 100:] = k[:, :50]
    after = prefix_weighting(k, 1.0, 0.1)
    assert torch.equal(before.weights[:, :100], after.weights[:, :100])
    assert torch.equal(before.newest[:, :100], after.newest[:, :100])
    assert not torch.equal(before.newest[:, 100:], after.newest[:, 100:])


@pytest.mark.parametrize("n", [1, 23, 24, 25, 64, 65, 129, 200])
def test_sizes_around_a_block(n, system):
    k = torch.randn(2, n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    torch.testing.assert_close(
        prefix_weighting(k, 1.0, 0.05).weights, separate_solves(*system(k, 1.0, 0.05)), rtol=1e-9, atol=1e-9
    )


def test_small_eps_is_computed_in_float64():
    k = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)) / 3
    narrow, wide = (prefix_weighting(x, 1.0, 1e-5).newest for x in (k, k.double()))
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-3, atol=1e-3)


def test_clones_without_eps():
    with pytest.raises(SolverError, match="not positive definite.*from point 1 on.*larger eps"):
        prefix_weighting(torch.zeros(5, 2), eps=0.0)


@pytest.mark.parametrize("pieces", [[1] * 60, [7, 1, 30, 22], [60]])
def test_in_pieces(pieces):
    x = torch.randn(3, 60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2
    present = torch.rand(3, 60, generator=torch.Generator().manual_seed(1)) > 0.2
    whole = arrival_weights(System(x, present, 0.1))
    arriving, start, actual = Arrival(), 0, []
    for n in pieces:
        actual.append(arriving.add(System(x[:, start : start + n], present[:, start : start + n], 0.1)))
        start += n
    torch.testing.assert_close(torch.cat(actual, dim=1), whole, rtol=1e-10, atol=1e-10)
