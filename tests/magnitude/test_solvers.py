"""Every solver against the dense system in float64: weights, gradients, masks, statuses."""

import math

import pytest
import torch

from unsoft.errors import SolverError
from unsoft.magnitude import Status, weighting
from unsoft.magnitude.gaussian import System
from unsoft.magnitude.iterative import truncated
from unsoft.magnitude.solver import Options

SCALES = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
CONVERGED = [("cholesky", {}), ("cg", {}), ("pcg", {"rank": 20}), ("lowrank", {"rank": 90}), ("auto", {})]


def relative(x, y):
    return float((x - y).detach().abs().max() / y.detach().abs().max())


@pytest.mark.parametrize(("solver", "options"), CONVERGED, ids=[name for name, _ in CONVERGED])
def test_weights_and_gradients(exact, keys, mask, solver, options):
    upstream = torch.randn(2, 3, 90, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    k, t = keys.clone().requires_grad_(), SCALES.clone().requires_grad_()
    expected_weights = exact(k, t, 0.1, mask)
    expected = torch.autograd.grad((expected_weights * upstream).sum(), (k, t))
    k, t = keys.clone().requires_grad_(), SCALES.clone().requires_grad_()
    actual = weighting(k, t, 0.1, solver, mask=mask, **options)
    assert actual.status is Status.CONVERGED and actual.residual <= 1e-10
    assert relative(actual.weights, expected_weights) < 1e-8
    torch.testing.assert_close(actual.magnitude, expected_weights.sum(-1), rtol=1e-8, atol=1e-8)
    for ours, theirs in zip(
        torch.autograd.grad((actual.weights * upstream).sum(), (k, t)), expected, strict=True
    ):
        assert relative(ours, theirs) < 1e-7
    if mask is not None:
        assert actual.weights[~mask].eq(0).all()


def textbook_cg(a, b, steps):
    w, r, p = torch.zeros_like(b), b, b
    rr = (r * r).sum(-1, keepdim=True)
    for _ in range(steps):
        q = (a @ p[..., None])[..., 0]
        alpha = rr / (p * q).sum(-1, keepdim=True)
        w, r = w + alpha * p, r - alpha * q
        fresh = (r * r).sum(-1, keepdim=True)
        p, rr = r + fresh / rr * p, fresh
    return w


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_truncated_is_the_same_iterations(system, keys, mask, steps):
    upstream = torch.randn(2, 3, 90, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    k, t = keys.clone().requires_grad_(), SCALES.clone().requires_grad_()
    exact = textbook_cg(*system(k, t, 0.1, mask), steps)
    expected = torch.autograd.grad((exact * upstream).sum(), (k, t))
    k, t = keys.clone().requires_grad_(), SCALES.clone().requires_grad_()
    actual = weighting(k, t, 0.1, "cg", mask=mask, iterations=steps)
    assert actual.status is Status.TRUNCATED and actual.iterations == steps
    assert relative(actual.weights, exact) < 1e-11
    a, b = system(keys, SCALES, 0.1, mask)
    true = (b - (a @ actual.weights.detach()[..., None])[..., 0]).norm(dim=-1) / b.norm(dim=-1)
    assert actual.residual == pytest.approx(float(true.max()), rel=1e-9)
    for ours, theirs in zip(
        torch.autograd.grad((actual.weights * upstream).sum(), (k, t)), expected, strict=True
    ):
        assert relative(ours, theirs) < 1e-10


@pytest.mark.parametrize(("solver", "options"), [*CONVERGED, ("cg", {"iterations": 5})])
def test_float32(keys, solver, options):
    narrow = weighting(keys.float(), SCALES.float(), 0.1, solver, **options)
    wide = weighting(keys, SCALES, 0.1, solver, **options)
    assert narrow.weights.dtype == torch.float32
    assert (
        relative(narrow.weights.double(), wide.weights) < 5e-3
    )  # cg stops at 1e-4, times a condition of some tens
    torch.testing.assert_close(narrow.magnitude.double(), wide.magnitude, rtol=1e-3, atol=0)


@pytest.mark.parametrize("solver", ["cholesky", "cg", "pcg", "lowrank", "truncated"])
def test_no_nan_gradient_where_points_coincide(solver):
    k = torch.zeros(12, 3).index_fill(0, torch.tensor([4, 7]), 2.0).requires_grad_()
    options = {"iterations": 2} if solver == "truncated" else {}
    actual = weighting(k, 1.0, 0.1, "cg" if solver == "truncated" else solver, **options)
    (gradient,) = torch.autograd.grad(actual.weights.square().sum(), k)
    assert gradient.isfinite().all()


def test_closed_forms():
    """m clones and a unique key far away: 1 / (m + eps) and 1 / (1 + eps)."""
    points = torch.cat([torch.zeros(50, 4), torch.full((1, 4), 30.0)]).double()
    for solver in ("cholesky", "cg", "pcg", "lowrank"):
        w = weighting(points, 1.0, 0.25, solver).weights
        torch.testing.assert_close(w[:50], torch.full((50,), 1 / 50.25, dtype=torch.float64))
        assert w[50] == pytest.approx(0.8, rel=1e-10)


def test_float64_is_reported():
    near = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).repeat(20, 1)
    near = near + 1e-4 * torch.randn(120, 4, generator=torch.Generator().manual_seed(1))
    assert weighting(near, 1.0, 0.1, "cholesky").precision == torch.float32
    actual = weighting(near, 1.0, 1e-9, "cholesky")
    assert actual.precision == torch.float64 and actual.residual < 1e-8


def test_non_convergence_is_never_silent():
    k = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(SolverError, match="out of steps.*allow more iterations"):
        weighting(k, 0.1, 1e-6, "pcg", iterations=2, rank=1)
    actual = weighting(k, 0.1, 1e-6, "pcg", iterations=2, rank=1, throw=False)
    assert actual.status is Status.STEPS and not actual.status.ok and actual.residual > 1e-4
    with pytest.raises(SolverError, match="singular.*raise eps"):
        weighting(torch.zeros(5, 2), 1.0, 0.0, "cholesky")
    assert weighting(torch.zeros(5, 2), 1.0, 0.0, "cholesky", throw=False).status is Status.SINGULAR
    coarse = weighting(torch.randn(300, 8), 8.0, 0.01, "lowrank", rank=4, throw=False)
    assert coarse.status is Status.INEXACT and coarse.residual > 1e-4


def test_stagnation_is_a_status():
    k = torch.randn(400, 2, generator=torch.Generator().manual_seed(0)) / 10
    actual = weighting(k, 1.0, 1e-9, "cg", tolerance=1e-7, throw=False)
    assert actual.status in (Status.STAGNATED, Status.BREAKDOWN, Status.STEPS) and actual.residual > 1e-7


def test_auto_says_what_it_chose():
    g = torch.Generator().manual_seed(0)
    assert weighting(torch.randn(40, 4, generator=g)).solver == "cholesky: 40 points are few"
    crowd = torch.randn(8, 16, generator=g).repeat(100, 1)
    assert weighting(crowd, 1.0, 0.1).solver.startswith("lowrank(8): 64 points explain all 800")
    assert "hardly any of them similar" in weighting(torch.randn(700, 64, generator=g), 4.0, 0.1).solver
    assert weighting(torch.randn(700, 3, generator=g), 1.0, 0.1).solver.startswith(("pcg", "lowrank"))
    assert weighting(torch.zeros(9, 2), 1.0, 0.0).solver == "cg: in float64, after singular"


def test_auto_is_right_whatever_it_chose(exact):
    g = torch.Generator().manual_seed(3)
    for k, t in ((torch.randn(700, 3, generator=g), 1.0), (torch.randn(700, 64, generator=g), 4.0)):
        actual = weighting(k, t, 0.1)
        expected_weights = exact(k.double(), t, 0.1)
        assert actual.magnitude == pytest.approx(float(expected_weights.sum()), rel=1e-3)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 130])
def test_sizes_around_a_tile(exact, n):
    k = torch.randn(3, n, 7, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    expected_weights = exact(k, 1.5, 0.1)
    for solver in ("cg", "pcg", "lowrank", "cholesky"):
        assert relative(weighting(k, 1.5, 0.1, solver).weights, expected_weights) < 1e-8


def crowded(kind, n=130, width=16):
    """Keys (2, n, width) whose system conjugate gradients solve in a few steps."""
    g = torch.Generator().manual_seed(0)
    k = torch.randn(2, n, width, generator=g, dtype=torch.float64)
    if kind == "seven places":
        k = k[:, torch.arange(n) % 7]
    elif kind == "one alone":
        k[:, :-1] = k[:, :1]
    elif kind == "far apart":
        k = 3 * k
    return k


@pytest.mark.parametrize("kind", ["seven places", "one alone", "far apart"])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.float64, 1e-11)])
def test_steps_beyond_convergence(kind, dtype, near):
    """20 steps of what needs fewer: the solution, and its gradient, as dense algebra has it."""
    keys = crowded(kind).to(dtype)
    upstream = torch.randn(2, 130, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, theirs = keys.clone().requires_grad_(), keys.double().requires_grad_()
    actual = weighting(ours, 1.0, 0.1, "cg", iterations=20)
    assert actual.status is Status.CONVERGED and actual.iterations < 20
    squares = (theirs[:, :, None] - theirs[:, None]).square().sum(-1) / 16
    a = torch.exp(-squares) + 0.1 * torch.eye(130, dtype=torch.float64)
    exact = torch.linalg.solve(a, torch.ones(2, 130, 1, dtype=torch.float64))[..., 0]
    torch.testing.assert_close(
        actual.weights.double(), exact, rtol=0, atol=near * float(exact.detach().abs().max())
    )
    (x,) = torch.autograd.grad((actual.weights * upstream.to(dtype)).sum(), ours)
    (y,) = torch.autograd.grad((exact * upstream).sum(), theirs)
    torch.testing.assert_close(x.double(), y, rtol=0, atol=near * float(y.abs().max()))


def test_each_system_stops_by_itself():
    """Side by side with one that has not converged: each has the gradient it has alone."""
    keys = torch.stack([crowded("one alone")[0], crowded("random")[0]])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # as many systems are solved side by side
    try:
        x = keys.clone().requires_grad_()
        together = weighting(x, 4.0, 0.01, "cg", iterations=8).weights
        (gradient,) = torch.autograd.grad(together.square().sum(), x)
    finally:
        torch.set_num_threads(threads)
    for number, k in enumerate(keys):
        k = k.clone().requires_grad_()
        alone = weighting(k, 4.0, 0.01, "cg", iterations=8)
        assert (alone.status is Status.CONVERGED) == (number == 0)
        torch.testing.assert_close(together[number], alone.weights)
        torch.testing.assert_close(gradient[number], *torch.autograd.grad(alone.weights.square().sum(), k))


def test_small_systems_are_solved_together_as_if_each_were_alone():
    """With their gradients; one that is not finite leaves the others alone."""
    points = torch.randn(40, 12, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def actual(x):
        x = x.clone().requires_grad_()
        weights = weighting(x, eps=0.1, solver="cg", iterations=4, throw=False).weights
        (slope,) = torch.autograd.grad((weights * weights.detach().cos()).sum(), x)
        return weights.detach(), slope

    together, alone = actual(points), [actual(one[None]) for one in points]
    for index, whole in enumerate(together):
        torch.testing.assert_close(whole, torch.cat([one[index] for one in alone]), rtol=1e-12, atol=1e-12)
    broken = System(
        torch.where(torch.arange(40)[:, None, None] == 7, torch.inf, points / math.sqrt(3)), None, 0.1
    )
    weights = truncated(broken, broken.ones, Options(1e-4, iterations=4, check=False)).weights
    torch.testing.assert_close(weights[8:], together[0][8:])
