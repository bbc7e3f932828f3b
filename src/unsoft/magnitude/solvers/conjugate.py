"""Conjugate gradients for (Z + eps) w = b, a fixed number of steps or to a tolerance, plain or
preconditioned.

Written in operations that autograd follows: run with gradients it differentiates the very iterations that
were made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.magnitude.gaussian.system import System
from unsoft.magnitude.solvers.contract import Outcome, Status, relative

Map = Callable[[Tensor], Tensor]
MOST_STEPS = 1000
REFRESH = 50
"""Steps after which the residual is computed again from the weights."""


class Iterated(NamedTuple):
    """Where conjugate gradients stopped."""

    weights: Tensor
    steps: int
    status: Status
    active: Tensor
    """Bool (systems, 1): which systems had not converged."""


def floor_of(b: Tensor) -> float:
    """The relative residual below which further steps would add nothing but rounding errors, for right-hand
    sides (systems, n).
    """
    return (32 + 4 * math.sqrt(b.shape[-1])) * torch.finfo(b.dtype).eps


def conjugate_gradients(
    product: Map,
    b: Tensor,
    *,
    steps: int,
    tolerance: float,
    first: Tensor | None = None,
    precondition: Map | None = None,
) -> Iterated:
    """Weights, steps made, and how it ended, for systems that are solved side by side; each stops when it has
    converged.

    ``product`` multiplies with the whole matrix, eps included. ``first`` is its product with b, if that is
    known.

    >>> a = torch.tensor([[[2.0, 1.0], [1.0, 2.0]]])
    >>> def product(x):
    ...     return (a @ x[..., None])[..., 0]
    >>> conjugate_gradients(product, torch.ones(1, 2), steps=9, tolerance=1e-6)[:3]
    (tensor([[0.3333, 0.3333]]), 1, <Status.CONVERGED: 'converged'>)
    """
    w, r = torch.zeros_like(b), b
    z = r if precondition is None else precondition(r)
    p, rz = z, (r * z).sum(-1, keepdim=True)
    goal = (tolerance * b.detach().norm(dim=-1, keepdim=True)) ** 2
    active = (r.detach() ** 2).sum(-1, keepdim=True) > goal
    before = torch.full_like(goal, torch.inf)
    for step in range(1, steps + 1):
        if not bool(active.any()):
            return Iterated(w, step - 1, Status.CONVERGED, active)
        q = first if step == 1 and first is not None and precondition is None else product(p)
        curvature = (p * q).sum(-1, keepdim=True)
        if bool((active & ~curvature.isfinite()).any()):
            return Iterated(w, step - 1, Status.NOT_FINITE, active)
        if bool((active & (curvature <= 0)).any()):
            return Iterated(w, step - 1, Status.BREAKDOWN, active)
        # where() on both sides: a system that has finished must not divide by what is left of its residual
        alpha = torch.where(active, rz / torch.where(active, curvature, 1.0), 0.0)
        w = w + alpha * p
        r = r - alpha * q
        size = (r.detach() ** 2).sum(-1, keepdim=True)
        now = active & (size > goal)
        begin_anew = step < steps and not bool(now.any())
        if step % REFRESH == 0 or begin_anew:
            r = b - product(w)  # the residual that is updated from step to step drifts away from the true one
            size = (r.detach() ** 2).sum(-1, keepdim=True)
            now = active & (size > goal)
            if bool((now & (size > 0.5 * before)).any()):
                return Iterated(w, step, Status.STAGNATED, now)
            before = size
        z = r if precondition is None else precondition(r)
        fresh = (r * z).sum(-1, keepdim=True)
        # The old direction belongs to another residual: start again from the gradient.
        beta = torch.where(now & (not begin_anew), fresh / torch.where(active, rz, 1.0), 0.0)
        p = z + beta * p
        rz, active = fresh, now
    return Iterated(w, steps, Status.STEPS if bool(active.any()) else Status.CONVERGED, active)


def outcome(product: Map, b: Tensor, found: Iterated) -> Outcome:
    """The solution together with its true residual."""
    weights = found.weights.detach()
    return Outcome(weights, relative(b - product(weights), b), found.status, found.steps, b.dtype)


def to_tolerance(
    system: System, b: Tensor, tolerance: float, steps: int | None = None, precondition: Map | None = None
) -> Outcome:
    """Steps until the residual is small enough, ``steps`` at most."""
    z = system.similarities(b)

    def product(p: Tensor) -> Tensor:
        return z.product(p) + system.eps * p

    found = conjugate_gradients(
        product,
        b,
        steps=steps or MOST_STEPS,
        tolerance=tolerance,
        first=z.first_product + system.eps * b,
        precondition=precondition,
    )
    return outcome(product, b, found)
