"""The gradient of a solved system: by A w = b, dw = -A^-1 dA w, one more solution with the same solver."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.errors import ConvergenceWarning
from unsoft.magnitude.autograd import apply
from unsoft.magnitude.gaussian.matrix import Matrix
from unsoft.magnitude.gaussian.system import System
from unsoft.magnitude.solvers.contract import Options, Outcome, Solve, joined
from unsoft.magnitude.untraced import full_precision, untraced


def implicit(solve: Solve) -> Solve:
    """A solver that knows nothing of gradients, with the gradient of the solution."""

    def differentiable(system: System, b: Tensor, options: Options) -> Outcome:
        return _solved(solve, system, b, options)

    return differentiable


@untraced
def _solved(solve: Solve, system: System, b: Tensor, options: Options) -> Outcome:
    report: list[Outcome] = []
    weights = apply(_Implicit, system.x, system, b, options, solve, report)
    found = report[0]
    return Outcome(weights, found.residual, found.status, found.iterations, found.precision, found.rank)


def _in_groups(solve: Solve, system: System, b: Tensor, options: Options) -> Outcome:
    return joined([solve(group, right, options) for group, (right,) in system.groups(b)])


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        system: System,
        b: Tensor,
        options: Options,
        solve: Solve,
        report: list[Outcome],
    ) -> Tensor:
        found = _in_groups(solve, system.detach(), b, options)
        report.append(found)
        ctx.save_for_backward(x, system.present, found.weights)
        ctx.eps, ctx.engine, ctx.options, ctx.solve = system.eps, system.engine, options, solve
        return found.weights

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
