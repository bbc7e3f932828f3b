"""What a solver of (Z + eps) w = b is given, and what it gives back.

solve(system, b, options) -> Outcome
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from unsoft.magnitude.gaussian.system import System


class Status(StrEnum):
    """From best to worst; the text says what it means and what helps."""

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
        """Did the solver do what it was asked to do?"""
        return self in (Status.CONVERGED, Status.TRUNCATED)


@dataclass(frozen=True)
class Options:
    """How to solve; a solver is given only those of ``iterations`` and ``rank`` that it takes."""

    tolerance: float
    """Relative residual to reach."""
    iterations: int | None = None
    rank: int | None = None
    check: bool = True
    """If not, the residual is not used, and need not be computed."""


@dataclass(frozen=True)
class Outcome:
    """What a solver found for several systems."""

    weights: Tensor
    """(systems, n)"""
    residual: Tensor
    """(systems,): |b - A w| / |b|, computed from the weights; an estimate where the solver says so."""
    status: Status
    iterations: int = 0
    precision: torch.dtype = torch.float32
    rank: int = 0


Solve = Callable[[System, Tensor, Options], Outcome]
"""From the operator, right-hand sides (systems, n) and options."""


def joined(outcomes: list[Outcome]) -> Outcome:
    """Groups of systems as one."""
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
    """|r| / |b| of each system; 0 for a system without points."""
    found: Tensor = residual.norm(dim=-1) / b.norm(dim=-1).clamp(min=torch.finfo(b.dtype).tiny)
    return found
