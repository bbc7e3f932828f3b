"""A registered solver works wherever a solver is chosen by name."""

import pytest
import torch

import unsoft
from unsoft.magnitude import solver as registry
from unsoft.magnitude import weighting
from unsoft.magnitude.solver import Outcome, Status, relative


def by_lu(system, b, options):
    """The whole contract: operator, right-hand sides and options in; weights, status and true
    residual out.
    """
    a = system.matrix()
    weights = torch.linalg.solve(a, b[..., None])[..., 0]
    residual = relative(b - (a @ weights[..., None])[..., 0], b)
    status = Status.CONVERGED if bool((residual <= options.tolerance).all()) else Status.INEXACT
    return Outcome(weights, residual, status, precision=b.dtype)


@pytest.fixture
def lu(monkeypatch):
    monkeypatch.setattr(registry, "_solvers", dict(registry._solvers))
    registry.register("lu", by_lu)


def test_a_new_solver_has_a_name_a_status_and_a_gradient(lu, exact, keys):
    keys.requires_grad_()
    actual = weighting(keys, 1.0, 0.1, "lu")
    assert actual.solver == "lu" and actual.status is Status.CONVERGED and actual.residual < 1e-10
    expected = exact(keys, torch.ones(3, dtype=keys.dtype), 0.1)
    torch.testing.assert_close(actual.weights, expected, rtol=1e-9, atol=1e-9)
    ours, theirs = (torch.autograd.grad(w.square().sum(), keys)[0] for w in (actual.weights, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_the_mechanism_knows_it_too(lu):
    q, k, v = (torch.randn(1, 2, 20, 4, dtype=torch.float64) for _ in range(3))
    ours, theirs = (
        unsoft.mechanism("magnitude", heads=2, head_dim=4, solver=name).double()
        for name in ("lu", "cholesky")
    )
    torch.testing.assert_close(ours(q, k, v), theirs(q, k, v))
    assert "solver=lu" in repr(ours)


def test_what_it_does_not_take_is_refused(lu):
    with pytest.raises(ValueError, match="'rank' belongs to solver 'lowrank' or 'pcg', not 'lu'"):
        weighting(torch.randn(5, 2), solver="lu", rank=3)
    with pytest.raises(
        ValueError, match="'solver' must be 'auto', 'cg', 'cholesky', 'lowrank', 'lu' or 'pcg', not 'qr'"
    ):
        weighting(torch.randn(5, 2), solver="qr")


def test_every_solver_is_registered():
    assert registry.solver_names() == ("cg", "cholesky", "lowrank", "pcg")
    for name in registry.solver_names():
        w = weighting(torch.randn(30, 4, dtype=torch.float64) / 4, 1.0, 0.1, name)
        assert w.status.ok and w.solver.startswith(name)
