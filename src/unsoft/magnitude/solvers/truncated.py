"""A few steps of conjugate gradients, as in Rosić 2026, with the exact gradient of those steps.

The backward pass runs the same steps again under autograd, on vectors only: each product with Z leaves a pair
of vectors, and one last pass over the matrix turns all pairs into the gradient of the points. No more
matrices exist at a time than there are threads, unless they are small: those are done together.

A system that converges before its steps are used up stops there: more steps would add nothing but rounding
errors. Its weights are the solution, so it gets the gradient of the solution, by solving once more. The
gradient of the steps made would lack what the remaining steps contribute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.magnitude.autograd import apply
from unsoft.magnitude.gaussian.matrix import Matrix
from unsoft.magnitude.gaussian.system import System
from unsoft.magnitude.solvers.conjugate import MOST_STEPS, Iterated, conjugate_gradients, floor_of, outcome
from unsoft.magnitude.solvers.contract import Options, Outcome, Status, joined
from unsoft.magnitude.untraced import full_precision, untraced

Pairs = list[tuple[Tensor, Tensor]]
_TOGETHER = 2**15
"""Numbers in the matrices of systems that are done together: for small ones calls take longer than work."""


class _Recorded(torch.autograd.Function):
    """Z p whose backward pass notes (gradient, p), from which the gradient of Z is made at the end."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, z: Matrix, known: Tensor | None, pairs: Pairs) -> Tensor:
        ctx.z, ctx.pairs = z, pairs
        ctx.save_for_backward(p)
        return z.product(p) if known is None else known.clone()

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (p,) = ctx.saved_tensors
        ctx.pairs.append((grad, p))
        return ctx.z.product(grad), None, None, None


def _together(system: System) -> int:
    """Not where one system could break down, and end the steps of the others with its own."""
    safe = system.eps >= 1e-3 and bool(system.x.isfinite().all())
    return _TOGETHER if safe else 0


def _steps(
    z: Matrix, b: Tensor, eps: float, steps: int, product: Callable[[Tensor], Tensor], first: Tensor
) -> Iterated:
    return conjugate_gradients(
        lambda p: product(p) + eps * p, b, steps=steps, tolerance=floor_of(b), first=first + eps * b
    )


def _with_ridge(z: Matrix, eps: float, p: Tensor) -> Tensor:
    return z.product(p) + eps * p


class _Truncated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        system: System,
        b: Tensor,
        steps: int,
        check: bool,
        report: list[Outcome],
    ) -> Tensor:
        outcomes: list[Outcome] = []
        active: list[Tensor] = []
        z: Matrix | None = None
        eps = system.eps
        for group, (ones,) in system.detach().groups(b, numbers=_together(system)):
            z = group.similarities(ones, z)
            found = _steps(z, ones, eps, steps, z.product, z.first_product)
            active.append(found.active)
            if check:
                outcomes.append(outcome(partial(_with_ridge, z, eps), ones, found))
            else:
                residual = ones.new_zeros(len(ones))
                outcomes.append(Outcome(found.weights, residual, found.status, found.steps, x.dtype))
        whole = joined(outcomes)
        report.append(whole)
        ctx.save_for_backward(x, system.present, b, whole.weights, torch.cat(active))
        ctx.eps, ctx.engine, ctx.steps = eps, system.engine, steps
        return whole.weights

    @staticmethod
    @full_precision
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, present, b, weights, active = ctx.saved_tensors
        gradients: list[Tensor] = []
        z: Matrix | None = None
        system = System(x, present, ctx.eps, ctx.engine)
        for group, (ones, *rest) in system.groups(b, grad, weights, active, numbers=_together(system)):
            z = group.similarities(ones, z)
            pairs = _pairs(z, ones, ctx.eps, ctx.steps, *rest)
            u, v = (torch.stack(side, dim=1) for side in zip(*pairs, strict=True))
            gradients.append(z.gradient(u, v))
        return torch.cat(gradients), None, None, None, None, None


def _pairs(
    z: Matrix, ones: Tensor, eps: float, steps: int, upstream: Tensor, weights: Tensor, active: Tensor
) -> Pairs:
    """(u, v) of which the sum of u v^T is the gradient of Z."""
    pairs: Pairs = []
    if bool(active.any()):
        with torch.enable_grad():
            start = ones.clone().requires_grad_()
            first = apply(_Recorded, start, z, z.first_product, pairs)
            found = _steps(z, start, eps, steps, lambda p: apply(_Recorded, p, z, None, pairs), first)
            torch.autograd.backward(found.weights, torch.where(active, upstream, 0.0))
    if not bool(active.all()):
        right = torch.where(active | (ones == 0), 0.0, upstream)
        adjoint = conjugate_gradients(
            partial(_with_ridge, z, eps), right, steps=MOST_STEPS, tolerance=floor_of(right)
        )
        pairs.append((-adjoint.weights, torch.where(active, 0.0, weights)))
    return pairs


@untraced
def truncated(system: System, b: Tensor, options: Options) -> Outcome:
    """The weights after ``options.iterations`` steps, differentiable."""
    report: list[Outcome] = []
    weights = apply(_Truncated, system.x, system, b, options.iterations, options.check, report)
    found = report[0]
    reached = Status.TRUNCATED if found.status is Status.STEPS else found.status
    return Outcome(weights, found.residual, reached, found.iterations, found.precision)
