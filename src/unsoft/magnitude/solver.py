"""Solvers of (Z + eps) w = b: what they get and return, the gradient of a solution, solvers by name.

A solver is a function that :func:`register` makes known by name to ``weighting`` and to the mechanism
(direct.py, iterative.py).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.errors import ConvergenceWarning
from unsoft.magnitude.gaussian import Matrix, System, full_precision, untraced


class Status(StrEnum):
    """Outcome of a solver, from best to worst; the text explains it and names what helps."""

    CONVERGED = "converged"
    TRUNCATED = "truncated: stopped after the number of steps that was asked for"
    INEXACT = (
        "inexact: the approximation is coarser than the tolerance; allow a higher rank, or use another solver"
    )
    STEPS = "not converged: out of steps; allow more iterations, raise eps, or use solver 'pcg' or 'cholesky'"
    STAGNATED = (
        "not converged: rounding keeps the residual from falling; use float64, raise eps, or loosen the"
        " tolerance"
    )
    BREAKDOWN = (
        "not converged: the matrix is not positive definite in this precision; use float64 or raise eps"
    )
    SINGULAR = (
        "singular: points coincide and eps does not tell them apart; raise eps, or use solver 'cg' for the"
        " smallest weights"
    )
    NOT_FINITE = "not finite: numbers overflowed; rescale the points"

    @property
    def ok(self) -> bool:
        """True if the weights are as accurate as requested."""
        return self in (Status.CONVERGED, Status.TRUNCATED)


@dataclass(frozen=True)
class Options:
    """Options of a solver, which gets only those of ``iterations`` and ``rank`` that it takes."""

    tolerance: float
    """Relative residual to reach."""
    iterations: int | None = None
    rank: int | None = None
    check: bool = True
    """If not, the residual is not used, and need not be computed."""


@dataclass(frozen=True)
class Outcome:
    """Result of a solver for several systems."""

    weights: Tensor
    """(systems, n)"""
    residual: Tensor
    """(systems,): |b - A w| / |b|, computed from the weights; an estimate for ``lowrank``."""
    status: Status
    iterations: int = 0
    precision: torch.dtype = torch.float32
    rank: int = 0


Solve = Callable[[System, Tensor, Options], Outcome]
"""From the operator, right-hand sides (systems, n) and options."""


def joined(outcomes: list[Outcome]) -> Outcome:
    """Join the outcomes of groups of systems."""
    if len(outcomes) == 1:
        return outcomes[0]
    order = list(Status)
    return Outcome(
        torch.cat([o.weights for o in outcomes]),
        torch.cat([o.residual for o in outcomes]),
        max((o.status for o in outcomes), key=order.index),
        max(o.iterations for o in outcomes),
        torch.float64 if any(o.precision == torch.float64 for o in outcomes) else torch.float32,
        max(o.rank for o in outcomes),
    )


def relative(residual: Tensor, b: Tensor) -> Tensor:
    """Return |r| / |b| of each system; 0 for a system without points."""
    ratio: Tensor = residual.norm(dim=-1) / b.norm(dim=-1).clamp(min=torch.finfo(b.dtype).tiny)
    return ratio


def implicit(solve: Solve) -> Solve:
    """Return a solver without gradients with the gradient of the solution."""
    return partial(_solved, solve)


@untraced
def _solved(solve: Solve, system: System, b: Tensor, options: Options) -> Outcome:
    report: list[Outcome] = []
    weights = _Implicit.apply(system.x, system, b, options, solve, report)  # type: ignore[no-untyped-call]
    return replace(report[0], weights=weights)


def _in_groups(solve: Solve, system: System, b: Tensor, options: Options) -> Outcome:
    return joined([solve(group, right, options) for group, (right,) in system.groups(b)])


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, system: System, b: Tensor, options: Options, solve: Solve, report: list[Outcome]
    ) -> Tensor:
        outcome = _in_groups(solve, system.detach(), b, options)
        report.append(outcome)
        ctx.save_for_backward(x, system.present, outcome.weights)
        ctx.eps, ctx.engine, ctx.options, ctx.solve = system.eps, system.engine, options, solve
        return outcome.weights

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, present, weights = ctx.saved_tensors
        system = System(x, present, ctx.eps, ctx.engine)
        if present is not None:
            grad = grad * present
        adjoint = _in_groups(ctx.solve, system, grad.contiguous(), ctx.options)
        if not adjoint.status.ok:
            text = (
                f"magnitude: the gradient's system was solved to {float(adjoint.residual.max()):.1e} only"
                f" ({adjoint.status})"
            )
            warnings.warn(text, ConvergenceWarning, stacklevel=2)
        gradients: list[Tensor] = []
        z: Matrix | None = None
        for group, (w, y) in system.groups(weights, adjoint.weights):
            z = group.similarities(w, z)
            gradients.append(z.gradient(-y[:, None], w[:, None]))
        return torch.cat(gradients), None, None, None, None, None


@dataclass(frozen=True)
class Solver:
    """A solver under its name."""

    name: str
    solve: Solve
    """Its weights carry the gradient with respect to the points."""
    takes: frozenset[str]
    """Those of "iterations" and "rank" that the solver uses."""
    truncates: bool
    """True if ``iterations`` is the exact number of steps, with the gradient of those; otherwise the
    maximum."""
    needs_ridge: bool
    """True if eps must be positive."""


_solvers: dict[str, Solver] = {}


def register(
    name: str,
    solve: Solve,
    *,
    takes: tuple[str, ...] = (),
    differentiable: bool = False,
    truncates: bool = False,
    needs_ridge: bool = False,
) -> None:
    """Register a solver by name.

    Unless it is ``differentiable`` by itself, ``solve`` is called without gradients, on a few systems at a
    time, and the gradient is that of the solution: one more call.
    """
    with_gradient = solve if differentiable else implicit(solve)
    _solvers[name] = Solver(name, with_gradient, frozenset(takes), truncates, needs_ridge)


def solver_names() -> tuple[str, ...]:
    """Return the names of all solvers, in alphabetical order."""
    return tuple(sorted(_solvers))


def solver(name: str) -> Solver:
    """Return the solver of that name; raise KeyError if there is none."""
    return _solvers[name]
