"""What the points that streaming magnitude has forgotten still predict: little each, but they are many.

    at x: level exp(-|x - middle|^2)

middle is the mean of their places; level is such that the points of the last chunk see, on average, what the
forgotten points predicted together when they were forgotten.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unsoft.magnitude.streaming.centres import Centres


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrix times vector; for a batch of small ones faster than bmm."""
    return (matrix * vector[:, None]).sum(-1)


def background(x: Tensor, state: Centres) -> Tensor:
    """What the forgotten points still predict at x (systems, n): little each, but they are many."""
    return state.level[:, None] * _bump(x, state.middle)


def _bump(x: Tensor, middle: Tensor) -> Tensor:
    return (x - middle[:, None]).square().sum(-1).neg().exp()


def recalled(
    x: Tensor,
    ones: Tensor,
    among: Tensor,
    near: Tensor,
    lost: Tensor,
    beta: Tensor,
    before: Centres,
    after: Centres,
) -> Centres:
    """The state with those that are lost, of (centres, points of the chunk), among the forgotten.

    beta are the weights of the points in the prediction, so that those of the centres are alpha - Q K_cx
    beta.
    """
    size, count = near.shape[2], ones.sum(-1).clamp(min=2)
    weights = torch.cat([before.alpha - times(before.explained, times(near.mT, beta)), beta], dim=-1)
    alike = (
        torch.cat([near.sum(1), (among.sum(1) - among.diagonal(dim1=-2, dim2=-1)) * ones], dim=-1)
        / count[:, None]
    )
    total = before.total + (lost * weights * alike).sum(-1)
    forgotten = before.forgotten + lost.sum(-1)
    places = times(x.mT, lost[:, size:]) + times(
        torch.where(before.there[..., None], before.x, 0.0).mT, lost[:, :size]
    )
    middle = (before.forgotten[:, None] * before.middle + places) / forgotten.clamp(min=1)[:, None]
    mean = (_bump(x, middle) * ones).sum(-1) / count
    level = torch.where(mean > 0, total / torch.where(mean > 0, mean, 1.0), 0.0)
    return replace(after, forgotten=forgotten, total=total, level=level, middle=middle)
