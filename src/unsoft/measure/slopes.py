"""What do negative logits still teach? Slopes of a row as one of its logits moves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.measure.arguments import check_float, row_weights

__all__ = ["Gradient", "gradient"]


class Gradient(NamedTuple):
    """Each field has one number for each value of the moving logit."""

    weight: Tensor
    """|da_0/ds_0|: does the key's own weight react?"""
    key: Tensor
    """|da/ds_0|: what the loss can tell the moving key."""
    query: Tensor
    """|da/ds|: what the loss can tell the query, through all keys."""


def gradient(mechanism: Any, logits: Tensor, others: Tensor) -> Gradient:
    """Slopes of the weights of a row (s, others) for every s of ``logits``, with J_jl = da_j/ds_l.

        weight = |J_00|        key = sqrt(sum_j J_j0^2)        query = sqrt(sum_jl J_jl^2)

    For a loss whose slope along the values, dloss/do . v_j, is independent with variance 1 for each key,
    ``key`` is the root mean square of dloss/ds_0, and with standard normal keys and the scale 1/sqrt(dim),
    ``query`` is that of |dloss/dq|. ``logits`` is (points,), ``others`` (keys - 1,); ``mechanism`` is a
    :class:`unsoft.Formula` or a differentiable function from logits to weights.

    Answers: does a key with a negative logit still learn? Under softmax its gradient dies off like exp(s),
    under relu it is exactly 0.

    Range: at least 0.

    >>> from unsoft.formula import Formula
    >>> softmax = Formula("exp(s - m)", "exp(s - m)", "s")
    >>> gradient(softmax, torch.tensor([0.0, -9.0]), torch.tensor([0.0])).weight        # a (1 - a)
    tensor([2.5000e-01, 1.2338e-04])
    """
    weigh = row_weights(mechanism)
    check_float("logits", logits, 1, "(points,)")
    check_float("others", others, 1, "(keys - 1,)")
    if logits.dim() != 1 or others.dim() != 1:
        raise ValueError(
            "measure: arguments 'logits' and 'others' must have one dimension, not shapes"
            f" {tuple(logits.shape)} and {tuple(others.shape)}"
        )
    with torch.enable_grad():
        moving = logits.detach()[:, None]
        rest = others.detach().to(moving).expand(len(logits), -1)
        rows = torch.cat([moving, rest], -1).requires_grad_()
        weights = weigh(rows)
        # Rows do not mix, so the slopes of a whole column of weights come from one backward pass.
        columns = [_slopes(weights[:, j], rows) for j in range(rows.shape[-1])]
    jacobian = torch.stack(columns, -2)
    return Gradient(
        weight=jacobian[:, 0, 0].abs(),
        key=jacobian[:, :, 0].norm(dim=-1),
        query=jacobian.flatten(-2).norm(dim=-1),
    )


def _slopes(column: Tensor, rows: Tensor) -> Tensor:
    if not column.requires_grad:  # constant weights
        return torch.zeros_like(rows)
    (found,) = torch.autograd.grad(column.sum(), rows, retain_graph=True, allow_unused=True)
    return torch.zeros_like(rows) if found is None else found
