"""A few steps of conjugate gradients, as document 002 has it, with the exact gradient of those steps.

The backward pass runs the same steps again under autograd, on vectors only: each product with Z leaves a pair of vectors, and
one last pass over the matrix turns all pairs into the gradient of the points. No more matrices exist at a time than there are
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.magnitude.cg import conjugate_gradients, floor_of, outcome
from unsoft.magnitude.kernel import Matrix, similarities
from unsoft.magnitude.status import Outcome, Status, joined
from unsoft.magnitude.untraced import untraced

Group = tuple[Tensor, Tensor | None, Tensor]


def groups(x: Tensor, present: Tensor | None, *more: Tensor) -> Iterator[tuple[Any, ...]]:
    """The systems, as many at a time as there are threads (all at once on other devices): (x, present, ...) of each group."""
    size = torch.get_num_threads() if x.device.type == "cpu" else max(len(x), 1)
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        yield x[part], None if present is None else present[part], *(y[part] for y in more)


class _Recorded(torch.autograd.Function):
    """Z p whose backward pass notes (gradient, p), from which the gradient of Z is made at the end."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, z: Matrix, known: Tensor | None, pairs: list) -> Tensor:
        ctx.z, ctx.pairs = z, pairs
        ctx.save_for_backward(p)
        return z.product(p) if known is None else known.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (p,) = ctx.saved_tensors
        ctx.pairs.append((grad, p))
        return ctx.z.product(grad), None, None, None


def _steps(
    z: Matrix,
    b: Tensor,
    eps: float,
    steps: int,
    product: Callable[[Tensor], Tensor],
    first: Tensor,
) -> tuple[Tensor, int, Status]:
    return conjugate_gradients(
        lambda p: product(p) + eps * p, b, steps=steps, tolerance=floor_of(b.dtype), first=first + eps * b
    )


class _Truncated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        present: Tensor | None,
        b: Tensor,
        eps: float,
        steps: int,
        check: bool,
        report: list,
    ) -> Tensor:
        outcomes, z = [], None
        for points, seen, ones in groups(x, present, b):
            z = similarities(points, seen, ones, z)
            found = _steps(z, ones, eps, steps, z.product, z.first_product)
            if check:
                outcomes.append(outcome(lambda p, z=z: z.product(p) + eps * p, ones, found))
            else:
                outcomes.append(
                    Outcome(found[0], found[0].new_zeros(len(points)), found[2], found[1], x.dtype)
                )
        whole = joined(outcomes)
        report.append(whole)
        ctx.save_for_backward(x, present, b)
        ctx.eps, ctx.steps = eps, steps
        return whole.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, present, b = ctx.saved_tensors
        gradients, z = [], None
        for points, seen, ones, upstream in groups(x, present, b, grad):
            z = similarities(points, seen, ones, z)
            pairs: list[tuple[Tensor, Tensor]] = []
            with torch.enable_grad():
                start = ones.clone().requires_grad_()
                first = _Recorded.apply(start, z, z.first_product, pairs)
                weights, _, _ = _steps(
                    z,
                    start,
                    ctx.eps,
                    ctx.steps,
                    lambda p, z=z, pairs=pairs: _Recorded.apply(p, z, None, pairs),
                    first,
                )
                if weights.requires_grad:
                    torch.autograd.backward(weights, upstream)
            if pairs:
                u, v = (torch.stack(side, dim=1) for side in zip(*pairs, strict=True))
                gradients.append(z.gradient(u, v))
            else:
                gradients.append(torch.zeros_like(points))
        return torch.cat(gradients), None, None, None, None, None, None


@untraced
def truncated_weights(
    x: Tensor, present: Tensor | None, b: Tensor, eps: float, steps: int, check: bool = True
) -> tuple[Tensor, Outcome]:
    """Weights after ``steps`` steps, differentiable, and how that went. Without ``check`` the residual is not computed."""
    report: list[Outcome] = []
    weights = _Truncated.apply(x, present, b, eps, steps, check, report)
    found = report[0]
    reached = Status.TRUNCATED if found.status is Status.STEPS else found.status
    return weights, Outcome(weights, found.residual, reached, found.iterations, found.precision)
