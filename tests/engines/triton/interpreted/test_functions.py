"""Functions that triton.language lacks, at the ends of their ranges, against torch's."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from unsoft.engines.triton.kernel import functions  # noqa: E402

pytestmark = pytest.mark.gpu_check
expdiff, log1p, power = functions.expdiff, functions.log1p, functions.power


@triton.jit
def log1p_kernel(x, y):
    at = tl.arange(0, 8)
    tl.store(y + at, log1p(tl.load(x + at)))


@triton.jit
def power_kernel(x, e, y):
    at = tl.arange(0, 8)
    tl.store(y + at, power(tl.load(x + at), tl.load(e + at)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log1p(dtype):
    x = torch.tensor([0.0, 1e-9, -1e-9, 0.7, -1.0, 1e35, torch.inf, torch.nan], dtype=dtype)
    actual = torch.empty_like(x)
    log1p_kernel[(1,)](x, actual)
    torch.testing.assert_close(actual, x.log1p(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_power(dtype):
    x = torch.tensor([0.0, 0.0, 2.0, -2.0, -2.0, -2.0, -2.0, 3.0], dtype=dtype)
    e = torch.tensor([0.0, 1.5, -3.0, 3.0, 4.0, 0.5, 0.0, 2.5], dtype=dtype)
    actual = torch.empty_like(x)
    power_kernel[(1,)](x, e, actual)
    torch.testing.assert_close(actual, x**e, equal_nan=True)


@triton.jit
def expdiff_kernel(x, y, m, z):
    at = tl.arange(0, 1024)
    tl.store(z + at, expdiff(tl.load(x + at), tl.load(y + at), tl.load(m + at)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_expdiff(dtype):
    """From differences of 1e-8 across the edge of the polynomial to 10, within four units of the result."""
    source = torch.Generator().manual_seed(0)
    y = torch.randn(1024, generator=source, dtype=dtype)
    x = y + torch.logspace(-8, 1, 1024, dtype=dtype) * torch.randn(1024, generator=source).sign()
    m, actual = torch.maximum(x, y), torch.empty_like(x)
    expdiff_kernel[(1,)](x, y, m, actual)
    expected = (y.double() - m.double()).exp() * torch.expm1(x.double() - y.double())
    assert ((actual - expected) / expected).abs().nan_to_num().max() < 6 * torch.finfo(dtype).eps
