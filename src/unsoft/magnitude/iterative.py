"""Conjugate gradients: ``cg``, to a tolerance or for a fixed number of steps, and ``pcg``, preconditioned."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.magnitude.direct import Pivoted, pivoted_cholesky
from unsoft.magnitude.gaussian import Matrix, System, full_precision, untraced
from unsoft.magnitude.solver import Options, Outcome, Status, implicit, joined, register, relative

Map = Callable[[Tensor], Tensor]
MOST_STEPS = 1000
REFRESH = 50
"""Steps after which the residual is computed again from the weights."""


class Iterated(NamedTuple):
    """Result of conjugate gradients when they stopped."""

    weights: Tensor
    steps: int
    status: Status
    active: Tensor
    """Bool (systems, 1): which systems had not converged."""


def floor_of(b: Tensor) -> float:
    """Return the relative residual below which further steps would only add rounding errors, for right-hand
    sides (systems, n)."""
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
    """Return weights, number of steps and status of systems that are solved side by side; each stops when it
    has converged.

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
        # p (Z + eps) p is positive in exact arithmetic; if it is not, the precision is exhausted.
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
            # Less than halved since the last true residual: further steps only move rounding errors about.
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


def with_ridge(product: Map, eps: float) -> Map:
    """Return the product with Z + eps, given that with Z."""
    return lambda p: product(p) + eps * p


def outcome(product: Map, b: Tensor, result: Iterated) -> Outcome:
    """Return the solution together with its true residual."""
    weights = result.weights.detach()
    return Outcome(weights, relative(b - product(weights), b), result.status, result.steps, b.dtype)


def to_tolerance(
    system: System, b: Tensor, tolerance: float, steps: int | None = None, precondition: Map | None = None
) -> Outcome:
    """Iterate until the residual is small enough, for at most ``steps``."""
    z = system.similarities(b)
    product, first = with_ridge(z.product, system.eps), z.first_product + system.eps * b
    options: dict[str, Any] = {"steps": steps or MOST_STEPS, "tolerance": tolerance}
    result = conjugate_gradients(product, b, first=first, precondition=precondition, **options)
    return outcome(product, b, result)


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
    """Return how many numbers may be done together: 0 where one system could break down and stop the
    others."""
    safe = system.eps >= 1e-3 and bool(system.x.isfinite().all())
    return _TOGETHER if safe else 0


def _steps(product: Map, first: Tensor, b: Tensor, eps: float, steps: int) -> Iterated:
    """Take a fixed number of steps, given the product with Z and that product of b; fewer only where a system
    has converged to rounding errors."""
    first = first + eps * b
    return conjugate_gradients(with_ridge(product, eps), b, steps=steps, tolerance=floor_of(b), first=first)


class _Truncated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, system: System, b: Tensor, steps: int, check: bool, report: list[Outcome]
    ) -> Tensor:
        outcomes: list[Outcome] = []
        active: list[Tensor] = []
        z: Matrix | None = None
        eps = system.eps
        for group, (ones,) in system.detach().groups(b, numbers=_together(system)):
            z = group.similarities(ones, z)
            result = _steps(z.product, z.first_product, ones, eps, steps)
            active.append(result.active)
            if check:
                outcomes.append(outcome(with_ridge(z.product, eps), ones, result))
            else:
                residual = ones.new_zeros(len(ones))
                outcomes.append(Outcome(result.weights, residual, result.status, result.steps, x.dtype))
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
    """Return pairs (u, v) of which the sum of u v^T is the gradient of Z."""
    pairs: Pairs = []
    if bool(active.any()):
        with torch.enable_grad():
            start = ones.clone().requires_grad_()
            first = _Recorded.apply(start, z, z.first_product, pairs)  # type: ignore[no-untyped-call]
            result = _steps(lambda p: _Recorded.apply(p, z, None, pairs), first, start, eps, steps)  # type: ignore[no-untyped-call]
            torch.autograd.backward(result.weights, torch.where(active, upstream, 0.0))
    # Converged systems: the gradient of the solution (one more system) instead of that of each step, which
    # would differentiate rounding errors.
    if not bool(active.all()):
        right = torch.where(active | (ones == 0), 0.0, upstream)
        product = with_ridge(z.product, eps)
        adjoint = conjugate_gradients(product, right, steps=MOST_STEPS, tolerance=floor_of(right))
        pairs.append((-adjoint.weights, torch.where(active, 0.0, weights)))
    return pairs


@untraced
def truncated(system: System, b: Tensor, options: Options) -> Outcome:
    """Return the weights after ``options.iterations`` steps, differentiable."""
    report: list[Outcome] = []
    weights = _Truncated.apply(system.x, system, b, options.iterations, options.check, report)  # type: ignore[no-untyped-call]
    status = Status.TRUNCATED if report[0].status is Status.STEPS else report[0].status
    return replace(report[0], weights=weights, status=status)


_converged = implicit(lambda system, b, options: to_tolerance(system, b, options.tolerance))


def cg(system: System, b: Tensor, options: Options) -> Outcome:
    """Solve with the gradient of the solution, or of the given number of steps."""
    return _converged(system, b, options) if options.iterations is None else truncated(system, b, options)


register("cg", cg, takes=("iterations",), differentiable=True, truncates=True)


RANK = 64


def pcg(system: System, b: Tensor, options: Options) -> Outcome:
    """Solve in at most ``iterations`` steps, with ``rank`` points for the preconditioner."""
    chosen = pivoted_cholesky(system, options.rank or RANK, system.eps * 1e-3)
    return to_tolerance(system, b, options.tolerance, options.iterations, preconditioner(chosen, system.eps))


def preconditioner(pivoted: Pivoted, eps: float) -> Callable[[Tensor], Tensor]:
    """Return r -> (F F^T + s)^-1 r with s = eps + the mean of what is left: close to (Z + eps)^-1, at the
    cost of two thin products."""
    f = pivoted.factor
    shift = eps + pivoted.left.mean(-1)[:, None, None] + torch.finfo(f.dtype).eps
    inner = f.mT @ f + shift * torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
    half = torch.linalg.solve_triangular(
        torch.linalg.cholesky(inner), f.mT, upper=False
    )  # (systems, rank, n)

    def preconditioned(r: Tensor) -> Tensor:
        solved: Tensor = (r - (half.mT @ (half @ r[..., None]))[..., 0]) / shift[..., 0]
        return solved

    return preconditioned


register("pcg", pcg, takes=("iterations", "rank"))
