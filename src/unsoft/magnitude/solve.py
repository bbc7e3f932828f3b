"""``weighting``: the magnitude weights of a set of points, by the solver of one's choice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from unsoft.errors import SolverError
from unsoft.magnitude.cg import conjugate_gradients, outcome
from unsoft.magnitude.cholesky import cholesky
from unsoft.magnitude.implicit import solved_weights
from unsoft.magnitude.kernel import similarities
from unsoft.magnitude.lowrank import lowrank_weights
from unsoft.magnitude.pivoted import pivoted_cholesky, preconditioner
from unsoft.magnitude.points import checked_eps, checked_points
from unsoft.magnitude.status import Outcome, Status
from unsoft.magnitude.truncated import truncated_weights

SOLVERS = ("auto", "cholesky", "cg", "pcg", "lowrank")
SMALL = 512
"""Up to this many points a factorisation is the fastest way."""
RANK = 64
"""Default rank of the preconditioner, and what ``auto`` tries to get by with."""
MOST_STEPS = 1000


@dataclass(frozen=True)
class Weighting:
    """The weights of points and how they were found."""

    weights: Tensor
    """(..., n): how much of the set each point stands for; 0 for a masked point. Can be negative where points nearly coincide."""
    magnitude: Tensor
    """(...): sum of the weights, the effective number of points."""
    status: Status
    """Of the worst system; its text says what it means."""
    residual: float
    """|1 - (Z + eps) w| / |1| of the worst system, computed from the weights (``lowrank``: on a sample of rows)."""
    iterations: int
    """Steps of conjugate gradients; 0 for the other solvers."""
    solver: str
    """The solver that was used, with the reason if ``auto`` chose it."""
    precision: torch.dtype
    """float64 if float32 was not enough."""


def weighting(
    points: Tensor, t: float | Tensor = 1.0, eps: float = 1e-2, solver: str = "auto", *, mask: Tensor | None = None,
    throw: bool = True, iterations: int | None = None, tolerance: float | None = None, rank: int | None = None,
) -> Weighting:  # fmt: skip
    """Solves (Z + eps 1) w = 1 with Z_jl = exp(-t |k_j - k_l|^2 / d) for points k of shape (..., n, d).

    Clones share the weight of one point, an isolated point keeps 1 / (1 + eps); the sum is the effective number of points.

    t
        How close points must be to count as one; a number or a tensor that broadcasts to the batch. Differentiable.
    solver
        ``cholesky`` exact; ``cg`` conjugate gradients, ``iterations`` steps and no more (the exact gradient of those), or to the
        tolerance if that is not given; ``pcg`` the same with a pivoted-Cholesky preconditioner of ``rank``; ``lowrank`` up to
        ``rank`` points stand for all; ``auto`` chooses, see ``.solver``.
    mask
        Bool (..., n), False = the point is as if absent.
    throw
        Raise :class:`unsoft.errors.SolverError` if the tolerance is not reached; otherwise look at ``.status``.
    tolerance
        Relative residual: 1e-4 in float32, 1e-10 in float64 unless given.

    >>> clones_and_one = torch.tensor([[0.0, 0.0]] * 50 + [[9.0, 9.0]])
    >>> w = weighting(clones_and_one, t=1.0, eps=0.0, solver="cg")
    >>> w.magnitude, w.weights[[0, 50]]
    (tensor(2.0000), tensor([0.0200, 1.0000]))
    >>> weighting(torch.randn(40, 8), t=2.0).status.name
    'CONVERGED'
    """
    where = "weighting"
    eps = checked_eps(eps, where)
    checked = checked_points(points, t, mask, where)
    _check_options(solver, iterations, tolerance, rank, eps)
    x, present, b = checked.x, checked.present, checked.ones
    tolerance = tolerance or (1e-10 if x.dtype == torch.float64 else 1e-4)
    reason = ""
    if solver == "auto":
        solver, reason = _chosen(x, present, eps, tolerance)
    if 0 in b.shape:
        weights, found = b, Outcome(b, b.new_zeros(len(b)), Status.CONVERGED, 0, x.dtype)
    elif solver == "cg" and iterations is not None:
        weights, found = truncated_weights(x, present, b, eps, iterations)
    elif solver == "lowrank":
        weights, found = lowrank_weights(x, present, b, eps, rank or 4 * RANK, tolerance)
    else:
        weights, found = solved_weights(
            x, present, b, _solve(solver, eps, tolerance, iterations or MOST_STEPS, rank or RANK)
        )
    if reason and not found.status.ok:
        weights, found, reason = _rescued(x, present, b, eps, tolerance, found)
        solver = "cg"
    residual = float(found.residual.max()) if len(b) else 0.0
    name = f"{solver}({found.rank})" if found.rank else solver
    result = Weighting(
        checked.shaped(weights), checked.shaped(weights.sum(-1)), found.status, residual, found.iterations,
        f"{name}: {reason}" if reason else name, found.precision,
    )  # fmt: skip
    if throw and not found.status.ok:
        raise SolverError(
            f"weighting: residual {residual:.1e} after {found.iterations} steps of {result.solver}; {found.status}"
        )
    return result


def _solve(solver: str, eps: float, tolerance: float, steps: int, rank: int):
    """The solver of one group of systems."""
    if solver == "cholesky":
        return partial(cholesky, eps=eps, tolerance=tolerance)
    return partial(_iterated, eps=eps, tolerance=tolerance, steps=steps, rank=rank if solver == "pcg" else 0)


def _iterated(
    x: Tensor, present: Tensor | None, b: Tensor, eps: float, tolerance: float, steps: int, rank: int
) -> Outcome:
    z = similarities(x, present, b)

    def product(p: Tensor) -> Tensor:
        return z.product(p) + eps * p

    precondition = None
    if rank:
        precondition = preconditioner(pivoted_cholesky(x, present, rank, eps * 1e-3), eps)
    found = conjugate_gradients(
        product,
        b,
        steps=steps,
        tolerance=tolerance,
        first=z.first_product + eps * b,
        precondition=precondition,
    )
    return outcome(product, b, found)


def _chosen(x: Tensor, present: Tensor | None, eps: float, tolerance: float) -> tuple[str, str]:
    """A solver, and why."""
    n = x.shape[1]
    if n <= SMALL:
        return "cholesky", f"{n} points are few"
    first = x[:1], None if present is None else present[:1]
    if float(pivoted_cholesky(*first, RANK // 8, 0.0).left.mean()) < 0.8:  # a quick look before a longer one
        left = float(pivoted_cholesky(*first, RANK, 0.1 * tolerance * eps).left.mean())
        if eps > 0 and left <= tolerance * eps:
            return "lowrank", f"{RANK} points explain all {n}"
        if left < 0.5:
            return "pcg", f"{RANK} points explain {1 - left:.0%} of {n}"
    return "cg", f"{n} points, hardly any of them alike"


def _rescued(
    x: Tensor, present: Tensor | None, b: Tensor, eps: float, tolerance: float, failed: Outcome
) -> tuple[Tensor, Outcome, str]:
    """What ``auto`` does when its choice fails: conjugate gradients in float64, which find the smallest weights of a singular system."""

    def solve(x: Tensor, present: Tensor | None, b: Tensor) -> Outcome:
        found = _iterated(x.double(), present, b.double(), eps, tolerance, MOST_STEPS, 0)
        return Outcome(
            found.weights.to(x.dtype),
            found.residual.to(x.dtype),
            found.status,
            found.iterations,
            torch.float64,
        )

    weights, found = solved_weights(x, present, b, solve)
    return weights, found, f"in float64, after {failed.status.name.lower()}"


def _check_options(
    solver: str, iterations: int | None, tolerance: float | None, rank: int | None, eps: float
) -> None:
    if solver not in SOLVERS:
        raise ValueError(f"weighting: argument 'solver' must be one of {', '.join(SOLVERS)}, not {solver!r}")
    for name, x in (("iterations", iterations), ("rank", rank)):
        if x is not None and (not isinstance(x, int) or isinstance(x, bool) or x < 1):
            raise ValueError(f"weighting: argument '{name}' must be a whole number of at least 1, not {x!r}")
    if iterations is not None and solver not in ("cg", "pcg"):
        raise ValueError(f"weighting: argument 'iterations' belongs to solver 'cg' or 'pcg', not {solver!r}")
    if rank is not None and solver not in ("pcg", "lowrank"):
        raise ValueError(f"weighting: argument 'rank' belongs to solver 'pcg' or 'lowrank', not {solver!r}")
    if tolerance is not None and not (isinstance(tolerance, float) and 0 < tolerance < 1):
        raise ValueError(f"weighting: argument 'tolerance' must be between 0 and 1, not {tolerance!r}")
    if solver == "lowrank" and eps == 0:
        raise ValueError("weighting: argument 'eps' must be positive for solver 'lowrank', not 0")
