"""Compiled code against torch: the two ways to compute everything in gaussian.py, direct.py and prefix.py."""

import pytest
import torch

from unsoft.engines.native import gaussian as native
from unsoft.magnitude import prefix_weighting, weighting
from unsoft.magnitude.direct import pivoted_cholesky
from unsoft.magnitude.gaussian import DenseGaussian, System, congruence, inverse_factor
from unsoft.magnitude.prefix import arrival_weights

MODULES = [
    "unsoft.magnitude.gaussian",
    "unsoft.magnitude.direct",
    "unsoft.magnitude.window",
    "unsoft.magnitude.prefix",
]


@pytest.fixture
def without_compiler(monkeypatch):
    for module in MODULES:
        monkeypatch.setattr(f"{module}.kernels_for", lambda x, engine: None)


def both(monkeypatch, compute):
    ours = compute()
    for module in MODULES:
        monkeypatch.setattr(f"{module}.kernels_for", lambda x, engine: None)
    return ours, compute()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 5, 64, 65, 200])
def test_packed_and_dense(n, dtype):
    g = torch.Generator().manual_seed(n)
    x, present = torch.randn(3, n, 9, generator=g, dtype=dtype) / 3, torch.rand(3, n, generator=g) > 0.2
    first, u, v = (torch.randn(s, generator=g, dtype=dtype) for s in ((3, n), (3, 4, n), (3, 4, n)))
    packed, dense = (kind(x, present, first) for kind in (native.PackedGaussian, DenseGaussian))
    tolerance = {"rtol": 100 * torch.finfo(dtype).eps, "atol": 100 * torch.finfo(dtype).eps * n**0.5}
    torch.testing.assert_close(packed.first_product, dense.first_product, **tolerance)
    torch.testing.assert_close(packed.product(first), dense.product(first), **tolerance)
    torch.testing.assert_close(packed.gradient(u, v), dense.gradient(u, v), **tolerance)


@pytest.mark.parametrize("systems", [1, 2, 5])
def test_threads_and_systems(systems):
    """Fewer systems than threads are cut into parts, more are shared out."""
    x = torch.randn(systems, 300, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = torch.randn(systems, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = DenseGaussian(x, None, v)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            actual = native.PackedGaussian(x, None, v)
            torch.testing.assert_close(actual.first_product, expected.first_product)
            torch.testing.assert_close(
                actual.gradient(v[:, None], v[:, None]), expected.gradient(v[:, None], v[:, None])
            )
    finally:
        torch.set_num_threads(threads)


def test_memory_is_reused():
    x, ones = torch.randn(2, 100, 3), torch.ones(2, 100)
    first = native.PackedGaussian(x, None, ones)
    second = native.PackedGaussian(x[:1] + 1, None, ones[:1], first)
    assert second.matrix.data_ptr() == first.matrix.data_ptr()
    torch.testing.assert_close(second.first_product, DenseGaussian(x[:1] + 1, None, ones[:1]).first_product)


@pytest.mark.parametrize("n", [1, 30, 64, 130])
def test_factor_and_its_gradient(monkeypatch, n):
    g = torch.Generator().manual_seed(n)
    b = torch.randn(2, n, n, generator=g, dtype=torch.float64)
    a = (b @ b.mT / n + torch.eye(n)).requires_grad_()
    upstream = torch.randn(2, n, n, generator=g, dtype=torch.float64)

    def compute():
        m = inverse_factor(a)
        return m.detach(), torch.autograd.grad((m * upstream).sum(), a)[0]

    ours, theirs = both(monkeypatch, compute)
    expected = torch.linalg.inv(torch.linalg.cholesky(a))
    (gradient,) = torch.autograd.grad((expected * upstream).sum(), a)
    for m, slope in (ours, theirs):
        torch.testing.assert_close(m, expected)
        torch.testing.assert_close(slope, (gradient + gradient.mT) / 2)


def test_congruence(monkeypatch):
    m, t = (torch.randn(2, 90, 90, dtype=torch.float64).tril() for _ in range(2))
    ours, theirs = both(monkeypatch, lambda: congruence(m, t, "auto"))
    torch.testing.assert_close(ours, theirs)


def test_pivoted(monkeypatch):
    x = torch.randn(3, 150, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[1] = x[1, :5].repeat(30, 1)  # five places: nothing is left after five steps
    present = torch.rand(3, 150, generator=torch.Generator().manual_seed(1)) > 0.2
    ours, theirs = both(monkeypatch, lambda: pivoted_cholesky(System(x, present, 0.0), 40, 1e-9))
    assert torch.equal(ours.taken, theirs.taken) and ours.taken[1].sum() == 5
    assert torch.equal(ours.pivots[ours.taken], theirs.pivots[ours.taken])
    torch.testing.assert_close(ours.factor, theirs.factor, rtol=1e-7, atol=1e-7)
    z = torch.cdist(x, x).square().neg().exp() * (present[:, :, None] & present[:, None])
    left = z - ours.factor @ ours.factor.mT
    torch.testing.assert_close(left.diagonal(dim1=-2, dim2=-1).clamp(min=0), ours.left, rtol=0, atol=1e-9)
    assert left[1].abs().max() < 1e-9


@pytest.mark.parametrize("solver", ["cholesky", "cg", "pcg", "lowrank"])
def test_without_a_compiler(without_compiler, keys, exact, mask, solver):
    k = keys.clone().requires_grad_()
    actual = weighting(k, 1.0, 0.1, solver, mask=mask)
    torch.testing.assert_close(actual.weights, exact(keys, 1.0, 0.1, mask), rtol=1e-7, atol=1e-7)
    assert torch.autograd.grad(actual.weights.sum(), k)[0].isfinite().all()


def test_prefix_without_a_compiler(monkeypatch, keys):
    x = keys.flatten(0, 1).requires_grad_()
    present = torch.rand(6, 90, generator=torch.Generator().manual_seed(0)) > 0.2
    upstream = torch.randn(6, 90, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def compute():
        w = arrival_weights(System(x, present, 0.1))
        return (
            w.detach(),
            torch.autograd.grad((w * upstream).sum(), x)[0],
            prefix_weighting(x.detach()).weights,
        )

    for a, b in zip(*both(monkeypatch, compute), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
