"""Conjugate gradients for (Z + eps) w = b, a fixed number of steps or to a tolerance, plain or preconditioned.

Written in operations that autograd follows: run with gradients it differentiates the very iterations that were made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unsoft.magnitude.status import Outcome, Status, relative

Map = Callable[[Tensor], Tensor]
REFRESH = 50
"""Steps after which the residual is computed anew from the weights."""


def floor_of(dtype: torch.dtype) -> float:
    """The relative residual below which further steps only stir rounding errors."""
    return 32 * torch.finfo(dtype).eps


def conjugate_gradients(
    product: Map, b: Tensor, *, steps: int, tolerance: float, first: Tensor | None = None, precondition: Map | None = None
) -> tuple[Tensor, int, Status]:  # fmt: skip
    """Weights, steps made, and how it ended, for systems that are solved side by side; each stops when it has converged.

    ``product`` multiplies with the whole matrix, eps included. ``first`` is its product with b, if that is known.

    >>> a = torch.tensor([[[2.0, 1.0], [1.0, 2.0]]])
    >>> conjugate_gradients(lambda x: (a @ x[..., None])[..., 0], torch.ones(1, 2), steps=9, tolerance=1e-6)
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
            return w, step - 1, Status.CONVERGED
        q = first if step == 1 and first is not None and precondition is None else product(p)
        curvature = (p * q).sum(-1, keepdim=True)
        if bool((active & ~curvature.isfinite()).any()):
            return w, step - 1, Status.NOT_FINITE
        if bool((active & (curvature <= 0)).any()):
            return w, step - 1, Status.BREAKDOWN
        # where() on both sides: a system that has finished must not divide by what is left of its residual
        alpha = torch.where(active, rz / torch.where(active, curvature, 1.0), 0.0)
        w = w + alpha * p
        r = r - alpha * q
        size = (r.detach() ** 2).sum(-1, keepdim=True)
        now = active & (size > goal)
        if step % REFRESH == 0 or (step < steps and not bool(now.any())):
            r = b - product(w)  # what the recurrence says has drifted from the truth: let the truth decide
            size = (r.detach() ** 2).sum(-1, keepdim=True)
            now = active & (size > goal)
            if bool((now & (size > 0.5 * before)).any()):
                return w, step, Status.STAGNATED
            before = size
        z = r if precondition is None else precondition(r)
        fresh = (r * z).sum(-1, keepdim=True)
        beta = torch.where(now, fresh / torch.where(active, rz, 1.0), 0.0)
        p = z + beta * p
        rz, active = fresh, now
    return w, steps, Status.STEPS if bool(active.any()) else Status.CONVERGED


def outcome(product: Map, b: Tensor, found: tuple[Tensor, int, Status]) -> Outcome:
    """The solution together with its true residual."""
    weights, steps, status = found
    weights = weights.detach()
    return Outcome(weights, relative(b - product(weights), b), status, steps, b.dtype)
