"""Gaussian matrices by kernels, in the strict interpreter, against plain float64."""

import pytest
import torch

import unsoft
from tests.engines.triton.parity import started
from unsoft.engines.gaussian import kernels_for
from unsoft.engines.triton import gaussian, launch
from unsoft.magnitude.direct import pivoted_cholesky
from unsoft.magnitude.gaussian import System
from unsoft.magnitude.prefix import arrival_weights
from unsoft.magnitude.solver import Options
from unsoft.magnitude.solver import solver as solver_of

pytestmark = pytest.mark.gpu_check


def plain(x, y, present=None):
    """exp(-|x_i - y_j|^2), the differences written out."""
    z = (-(x[:, :, None] - y[:, None]).square().sum(-1)).exp()
    return z if present is None else z * (present[:, :, None] & present[:, None, :])


def close(actual, expected, dtype, size=1.0):
    limit = {torch.float64: 1e-13, torch.float32: 3e-6}[dtype] * size
    error = float((actual.double() - expected).norm() / expected.norm())
    assert actual.dtype == dtype and error < limit, error


@pytest.mark.parametrize(
    ("n", "width", "dtype"),
    [(1, 64, torch.float32), (65, 80, torch.float32), (65, 128, torch.float64), (129, 64, torch.float32)],
)
@pytest.mark.parametrize("most", [0, gaussian.STORED], ids=["tiles", "stored"])
def test_products_and_gradients(n, width, dtype, most, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED_SIZES", gaussian.SIZES[False])
    source = torch.Generator().manual_seed(n)
    x = (torch.randn(1, n, width, generator=source) / width**0.5).to(dtype)
    present = torch.rand(1, n, generator=source) > 0.2
    present[:, 0] = True
    first, second = (torch.randn(1, n, generator=source).to(dtype) for _ in range(2))
    u, v = (torch.randn(1, 2, n, generator=source).to(dtype) for _ in range(2))
    z = gaussian.TiledGaussian(x, present, first, most=most)
    exact = x.double().requires_grad_()
    matrix = plain(exact, exact, present)
    for vector, actual in ((first, z.first_product), (second, z.product(second))):
        close(actual, (matrix.detach() @ vector.double()[..., None])[..., 0], dtype)
    loss = (u.double() * (v.double() @ matrix.mT)).sum()
    (expected,) = torch.autograd.grad(loss, exact)
    if n > 1:
        close(z.gradient(u, v), expected, dtype, 4.0)
    else:
        assert not z.gradient(u, v).any()


@pytest.mark.parametrize(("n", "m", "width"), [(1, 1, 1), (1, 50, 3), (17, 33, 5), (40, 16, 70)])
def test_between(n, m, width):
    x, y = torch.randn(3, n, width).double(), torch.randn(3, m, width).double()
    close(gaussian.between(x, y), plain(x, y), torch.float64)
    assert gaussian.between(x, y[:, :0]).shape == (3, n, 0)


def test_points_that_nearly_coincide_keep_their_digits():
    """1 - Z of points 1e-3 apart, far from the origin: |x|^2 + |y|^2 - 2 x y would leave nothing."""
    x = 100 + torch.arange(20)[None, :, None] * torch.full((1, 1, 4), 2.0**-10)
    z = gaussian.between(x, x)
    exact = plain(x.double(), x.double())
    torch.testing.assert_close((1 - z[0, 0, 1:]).double(), 1 - exact[0, 0, 1:], rtol=2e-2, atol=1e-7)


def test_results_are_the_same_every_time():
    x, u = torch.randn(1, 50, 8), torch.randn(1, 2, 50)
    runs = [gaussian.TiledGaussian(x, None, u[:, 0]) for _ in range(2)]
    assert torch.equal(*(z.first_product for z in runs)) and torch.equal(*(z.gradient(u, u) for z in runs))


@pytest.mark.parametrize("solver", ["cg", "pcg", "lowrank", "cholesky"])
def test_solvers(solver):
    """The weights of a solved system, and the gradient of the points, against a plain solution in float64."""
    torch.manual_seed(0)
    x = (torch.randn(1, 20, 6) / 2).double().requires_grad_()
    system = System(x, None, 0.1, "triton")
    rank = 20 if "rank" in solver_of(solver).takes else None
    actual = solver_of(solver).solve(system, system.ones, Options(1e-12, None, rank)).weights
    again = x.detach().clone().requires_grad_()
    a = plain(again, again) + 0.1 * torch.eye(20).double()
    expected = torch.linalg.solve(a, torch.ones(1, 20, 1).double())[..., 0]
    torch.testing.assert_close(actual, expected, atol=1e-8, rtol=1e-8)
    slope = torch.randn(1, 20).double()
    if actual.requires_grad:
        mine, exact = (
            torch.autograd.grad((w * slope).sum(), y)[0] for w, y in ((actual, x), (expected, again))
        )
        torch.testing.assert_close(mine, exact, atol=1e-7, rtol=1e-7)


def test_arrival_weights():
    torch.manual_seed(0)
    x = (torch.randn(2, 20, 6) / 2).double().requires_grad_()
    actual = arrival_weights(System(x, None, 0.1, "triton"))
    again = x.detach().clone().requires_grad_()
    a, each = plain(again, again) + 0.1 * torch.eye(20).double(), []
    for n in range(1, 21):
        each.append(torch.linalg.solve(a[:, :n, :n], torch.ones(2, n, 1).double())[:, -1, 0])
    expected = torch.stack(each, dim=1)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    slope = torch.randn(2, 20).double()
    mine, exact = (torch.autograd.grad((w * slope).sum(), y)[0] for w, y in ((actual, x), (expected, again)))
    torch.testing.assert_close(mine, exact, atol=1e-9, rtol=1e-9)


def test_what_has_no_kernel_is_done_by_torch():
    x = torch.randn(1, 30, 4)
    kernels = kernels_for(x, "triton")
    assert kernels is not None and kernels.pivoted is None and kernels.window is None
    mine, plain_torch = (
        pivoted_cholesky(System(x, None, 0.0, engine), 9, 0.0) for engine in ("triton", "torch")
    )
    assert torch.equal(mine.pivots, plain_torch.pivots)


@pytest.mark.parametrize("where", ["values", "mass"])
@pytest.mark.parametrize("causal", [True, False])
def test_magnitude(where, causal):
    """The mechanism, its gates and what it gates on the kernels; against the dense engine in float64."""
    torch.manual_seed(0)
    layer = unsoft.mechanism("magnitude+cog", heads=2, head_dim=8, where=where).double()
    q, k, v = (torch.randn(1, 2, 20, 8).double() for _ in range(3))
    results = []
    with started() as seen:
        for engine in ("triton", "dense"):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = layer(*leaves, is_causal=causal, engine=engine)
            results.append(
                [out, *torch.autograd.grad(out.square().sum(), [*leaves, layer.log_t, layer.beta])]
            )
    for mine, exact in zip(*results, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-8, rtol=1e-8)
    assert {"gaussian_product", "forward"} <= set(seen)
    assert ("gating" in seen) == (where == "values")


@pytest.mark.parametrize("shape", [(2, 3, 37), (37,), (1, 1, 2, 20)], ids=str)
def test_gates_on_values(shape):
    """The product and both gradients; a value that is not finite gives the gate none."""
    torch.manual_seed(0)
    value, gate = torch.randn(*shape, 40).double(), torch.rand(shape).double()
    grad = torch.randn_like(value)
    value[..., 5, 2], value[..., 6, 0] = torch.inf, torch.nan
    leaves = value.clone().requires_grad_(), gate.clone().requires_grad_()
    out = gaussian.gated(*leaves)
    torch.testing.assert_close(out.detach(), value * gate[..., None], equal_nan=True)
    d_value, d_gate = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(d_value, grad * gate[..., None])
    torch.testing.assert_close(d_gate, (torch.where(value.isfinite(), value, 0.0) * grad).sum(-1))


def test_gates_on_values_in_bfloat16_are_rounded_once():
    value, gate = torch.randn(1, 2, 20, 8).bfloat16(), torch.rand(1, 2, 20, requires_grad=True)
    out = gaussian.gated(value, gate)
    assert torch.equal(out, (value.float() * gate[..., None]).bfloat16())
    assert torch.autograd.grad(out.float().sum(), gate)[0].dtype == torch.float32
    assert gaussian.gated(value[:, :, :0], gate[:, :, :0]).shape == (1, 2, 0, 8)


def test_operator_of_gates():
    value, gate = torch.randn(1, 2, 20, 8, requires_grad=True), torch.rand(1, 2, 20, requires_grad=True)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(torch.ops.unsoft.triton_gated.default, (value, gate), test_utils=tests)
