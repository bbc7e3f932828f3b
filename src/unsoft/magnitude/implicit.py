"""The gradient of a solved system: by A w = b, dw = -A^-1 dA w, one more solution with the same solver."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.errors import ConvergenceWarning
from unsoft.magnitude.kernel import similarities
from unsoft.magnitude.status import Outcome, joined
from unsoft.magnitude.truncated import groups
from unsoft.magnitude.untraced import untraced

Solver = Callable[[Tensor, Tensor | None, Tensor], Outcome]
"""From points (systems, n, d), which are present, and right-hand sides (systems, n)."""


def in_groups(solve: Solver, x: Tensor, present: Tensor | None, b: Tensor) -> Outcome:
    """Solves a few systems at a time."""
    return joined([solve(*group) for group in groups(x, present, b)])


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, present: Tensor | None, b: Tensor, solve: Solver, report: list
    ) -> Tensor:
        found = in_groups(solve, x, present, b)
        report.append(found)
        ctx.save_for_backward(x, present, found.weights)
        ctx.solve = solve
        return found.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, present, weights = ctx.saved_tensors
        if present is not None:
            grad = grad * present
        adjoint = in_groups(ctx.solve, x, present, grad.contiguous())
        if not adjoint.status.ok:
            text = f"magnitude: the gradient's system was solved to {float(adjoint.residual.max()):.1e} only ({adjoint.status})"
            warnings.warn(text, ConvergenceWarning, stacklevel=2)
        gradients, z = [], None
        for points, seen, w, y in groups(x, present, weights, adjoint.weights):
            z = similarities(points, seen, w, z)
            gradients.append(z.gradient(-y[:, None], w[:, None]))
        return torch.cat(gradients), None, None, None, None


@untraced
def solved_weights(x: Tensor, present: Tensor | None, b: Tensor, solve: Solver) -> tuple[Tensor, Outcome]:
    """Weights, differentiable with respect to the points, and how the solution ended."""
    report: list[Outcome] = []
    weights = _Implicit.apply(x, present, b, solve, report)
    return weights, report[0]
