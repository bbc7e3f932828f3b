"""Magnitude of a set of points: ``weighting``, by the solver of one's choice, and numbers derived from it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.checks import one_of, whole_number
from unsoft.errors import SolverError
from unsoft.magnitude.direct import pivoted_cholesky
from unsoft.magnitude.gaussian import System, full_precision
from unsoft.magnitude.iterative import to_tolerance
from unsoft.magnitude.points import checked_eps, checked_points
from unsoft.magnitude.solver import Options, Outcome, Status, implicit, solver_names
from unsoft.magnitude.solver import solver as solver_of

SMALL = 512
"""Up to this many points a factorisation is the fastest way."""
RANK = 64
"""Rank that ``auto`` tries."""


@dataclass(frozen=True)
class Weighting:
    """The weights of points and how they were computed."""

    weights: Tensor
    """(..., n): how much of the set each point stands for; 0 for a masked point. Can be negative where points
    nearly coincide.
    """
    magnitude: Tensor
    """(...): sum of the weights, the effective number of points."""
    status: Status
    """Of the worst system; its text says what it means."""
    residual: float
    """|1 - (Z + eps) w| / |1| of the worst system, computed from the weights (``lowrank``: on a sample of
    rows).
    """
    iterations: int
    """Steps of conjugate gradients; 0 for the other solvers."""
    solver: str
    """The solver that was used, with the reason if ``auto`` chose it."""
    precision: torch.dtype
    """float64 if float32 was not enough."""


@full_precision
def weighting(
    points: Tensor,
    t: float | Tensor = 1.0,
    eps: float = 1e-2,
    solver: str = "auto",
    *,
    mask: Tensor | None = None,
    throw: bool = True,
    iterations: int | None = None,
    tolerance: float | None = None,
    rank: int | None = None,
) -> Weighting:
    """Solve (Z + eps 1) w = 1 with Z_jl = exp(-t |k_j - k_l|^2 / d) for points k of shape (..., n, d).

    Clones share the weight of one point, an isolated point keeps 1 / (1 + eps); the sum is the effective
    number of points.

    t
        How close points must be to count as one; a number or a tensor that broadcasts to the batch.
        Differentiable.
    solver
        ``cholesky`` exact; ``cg`` conjugate gradients, ``iterations`` steps and no more (the exact gradient
        of those), or to the tolerance if that is not given; ``pcg`` the same with a pivoted-Cholesky
        preconditioner of ``rank``; ``lowrank`` up to
        ``rank`` points stand for all; ``auto`` chooses, see ``.solver``.
    mask
        Bool (..., n), False = the point is as if absent.
    throw
        Raise :class:`unsoft.errors.SolverError` if the tolerance is not reached; otherwise look at
        ``.status``.
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
    system = checked.system(eps)
    b = system.ones
    options = Options(tolerance or (1e-10 if b.dtype == torch.float64 else 1e-4), iterations, rank)
    reason = ""
    if solver == "auto":
        solver, reason = _chosen(system, options.tolerance)
    if 0 in b.shape:
        outcome = Outcome(b, b.new_zeros(len(b)), Status.CONVERGED, 0, b.dtype)
    else:
        outcome = solver_of(solver).solve(system, b, options)
    if reason and not outcome.status.ok:
        outcome, reason = _in_float64(system, b, options), f"in float64, after {outcome.status.name.lower()}"
        solver = "cg"
    weights = outcome.weights
    residual = float(outcome.residual.max()) if len(b) else 0.0
    name = f"{solver}({outcome.rank})" if outcome.rank else solver
    chosen = f"{name}: {reason}" if reason else name
    shaped = checked.shaped(weights), checked.shaped(weights.sum(-1))
    result = Weighting(*shaped, outcome.status, residual, outcome.iterations, chosen, outcome.precision)
    if throw and not outcome.status.ok:
        raise SolverError(
            f"weighting: residual {residual:.1e} after {outcome.iterations} steps of {result.solver};"
            f" {outcome.status}"
        )
    return result


def _chosen(system: System, tolerance: float) -> tuple[str, str]:
    """Return the solver that ``auto`` chooses, and the reason."""
    n, eps = system.x.shape[1], system.eps
    if n <= SMALL:
        return "cholesky", f"{n} points are few"
    first = System(system.x[:1], None if system.present is None else system.present[:1], eps, system.engine)
    if float(pivoted_cholesky(first, RANK // 8, 0.0).left.mean()) < 0.8:  # a quick look before a longer one
        left = float(pivoted_cholesky(first, RANK, 0.1 * tolerance * eps).left.mean())
        if eps > 0 and left <= tolerance * eps:
            return "lowrank", f"{RANK} points explain all {n}"
        if left < 0.5:
            return "pcg", f"{RANK} points explain {1 - left:.0%} of {n}"
    return "cg", f"{n} points, hardly any of them similar"


@implicit
def _in_float64(system: System, b: Tensor, options: Options) -> Outcome:
    """Solve again when the choice of ``auto`` fails: by conjugate gradients, which find the smallest weights
    of a singular system."""
    outcome = to_tolerance(system.to(torch.float64), b.double(), options.tolerance)
    weights, residual = outcome.weights.to(b.dtype), outcome.residual.to(b.dtype)
    return Outcome(weights, residual, outcome.status, outcome.iterations, torch.float64)


def _check_options(
    solver: str, iterations: int | None, tolerance: float | None, rank: int | None, eps: float
) -> None:
    one_of("weighting", "solver", solver, ("auto", *solver_names()))
    for name, x in (("iterations", iterations), ("rank", rank)):
        if x is None:
            continue
        whole_number("weighting", name, x)
        takers = [other for other in solver_names() if name in solver_of(other).takes]
        if solver not in takers:
            listed = " or ".join(repr(other) for other in takers)
            raise ValueError(f"weighting: argument '{name}' belongs to solver {listed}, not {solver!r}")
    if tolerance is not None and not (isinstance(tolerance, float) and 0 < tolerance < 1):
        raise ValueError(f"weighting: argument 'tolerance' must be between 0 and 1, not {tolerance!r}")
    if solver != "auto" and solver_of(solver).needs_ridge and eps == 0:
        raise ValueError(f"weighting: argument 'eps' must be positive for solver {solver!r}, not 0")


def effective_count(
    points: Tensor,
    t: float | Tensor = 1.0,
    eps: float = 1e-2,
    *,
    mask: Tensor | None = None,
    solver: str = "auto",
) -> Tensor:
    """Return the magnitude of each set of points (..., n, d): between 1 and n if eps is small, additive over
    sets that are far apart.

    >>> effective_count(torch.tensor([[0.0], [0.0], [50.0]]), eps=1e-6)  # a pair of clones and one alone
    tensor(2.0000)
    """
    return weighting(points, t, eps, solver, mask=mask).magnitude


@full_precision
def spread(points: Tensor, t: float | Tensor = 1.0, *, mask: Tensor | None = None) -> Tensor:
    """Return Willerton's spread, sum_j 1 / sum_l Z_jl: a cheap relative of magnitude, positive term by term,
    without a system to solve.

    It removes clones among themselves only; near a crowd it counts more than magnitude does.

    >>> spread(torch.tensor([[0.0], [0.0], [50.0]]))
    tensor(2.)
    """
    checked = checked_points(points, t, mask, "spread")
    system = checked.system(0.0)
    sums = [group.similarities(group.ones).first_product for group, _ in system.groups()]
    total = torch.cat(sums) if sums else system.ones
    return checked.shaped(torch.where(total > 0, system.ones / total.clamp(min=1e-30), 0.0).sum(-1))


def shares(weights: Tensor, labels: Tensor, groups: int | None = None) -> Tensor:
    """Return the part of the magnitude of each group of points: weights (..., n), labels 0, 1, ... (negative:
    in no group).

    >>> w = weighting(torch.tensor([[0.0], [0.0], [50.0], [90.0]]), eps=1e-6).weights
    >>> shares(w, torch.tensor([0, 0, 1, 2]))
    tensor([0.3333, 0.3333, 0.3333])
    """
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.dtype == torch.bool:
        raise TypeError("shares: argument 'labels' must be a tensor of whole numbers, one for each point")
    if labels.shape != weights.shape:
        if labels.dim() > weights.dim() or labels.shape[-1:] != weights.shape[-1:]:
            raise ValueError(
                f"shares: argument 'labels' has shape {tuple(labels.shape)}; it must broadcast to the"
                f" weights, {tuple(weights.shape)}"
            )
        labels = labels.expand(weights.shape)
    count = int(labels.max()) + 1 if groups is None and labels.numel() else groups or 0
    hot = labels[..., None] == torch.arange(max(count, 0), device=weights.device)
    return (weights[..., None] * hot).sum(-2) / weights.sum(-1, keepdim=True)


@full_precision
def median_t(points: Tensor, *, mask: Tensor | None = None, most: int = 2048) -> Tensor:
    """Return an initial scale: t with Z = 1/e at the median distance, d / median of |k_j - k_l|^2 over pairs
    that differ.

    Of more than ``most`` points an evenly spaced selection is looked at. Sets without two different points
    get 1.

    >>> median_t(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))                               # 2 / 25
    tensor(0.0800)
    """
    checked = checked_points(points, 1.0, mask, "median_t")
    step = max(1, -(-checked.x.shape[1] // most))
    x = checked.x.detach()[:, ::step]
    squares = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()  # t = 1: already over d
    pair = torch.ones_like(squares, dtype=torch.bool).triu(1) & (squares > 0)
    if checked.present is not None:
        there = checked.present[:, ::step]
        pair = pair & there[:, :, None] & there[:, None, :]
    middle = torch.where(pair, squares, torch.nan).flatten(1).nanmedian(-1).values
    return checked.shaped(torch.where(middle > 0, 1 / middle, 1.0))
