"""Numbers about a set of points: how many different ones it holds, and which part of them a group is."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.magnitude.points import checked_points
from unsoft.magnitude.solve import weighting
from unsoft.magnitude.untraced import full_precision


def effective_count(
    points: Tensor,
    t: float | Tensor = 1.0,
    eps: float = 1e-2,
    *,
    mask: Tensor | None = None,
    solver: str = "auto",
) -> Tensor:
    """Return the magnitude of each set of points (..., n, d): between 1 and n if eps is small, additive over
    sets that are far apart.

    >>> effective_count(torch.tensor([[0.0], [0.0], [50.0]]), eps=1e-6)  # a pair of clones and one alone
    tensor(2.0000)
    """
    return weighting(points, t, eps, solver, mask=mask).magnitude


@full_precision
def spread(points: Tensor, t: float | Tensor = 1.0, *, mask: Tensor | None = None) -> Tensor:
    """Return Willerton's spread, sum_j 1 / sum_l Z_jl: a cheap relative of magnitude, positive term by term,
    without a system to solve.

    It removes clones among themselves only; near a crowd it counts more than magnitude does.

    >>> spread(torch.tensor([[0.0], [0.0], [50.0]]))
    tensor(2.)
    """
    checked = checked_points(points, t, mask, "spread")
    system = checked.system(0.0)
    sums = [group.similarities(group.ones).first_product for group, _ in system.groups()]
    total = torch.cat(sums) if sums else system.ones
    return checked.shaped(torch.where(total > 0, system.ones / total.clamp(min=1e-30), 0.0).sum(-1))


def shares(weights: Tensor, labels: Tensor, groups: int | None = None) -> Tensor:
    """Return the part of the magnitude of each group of points: weights (..., n), labels 0, 1, ... (negative:
    in no group).

    >>> w = weighting(torch.tensor([[0.0], [0.0], [50.0], [90.0]]), eps=1e-6).weights
    >>> shares(w, torch.tensor([0, 0, 1, 2]))
    tensor([0.3333, 0.3333, 0.3333])
    """
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.dtype == torch.bool:
        raise TypeError("shares: argument 'labels' must be a tensor of whole numbers, one for each point")
    if labels.shape != weights.shape:
        if labels.dim() > weights.dim() or labels.shape[-1:] != weights.shape[-1:]:
            raise ValueError(
                f"shares: argument 'labels' has shape {tuple(labels.shape)}; it must broadcast to the"
                f" weights, {tuple(weights.shape)}"
            )
        labels = labels.expand(weights.shape)
    count = int(labels.max()) + 1 if groups is None and labels.numel() else groups or 0
    hot = labels[..., None] == torch.arange(max(count, 0), device=weights.device)
    return (weights[..., None] * hot).sum(-2) / weights.sum(-1, keepdim=True)


@full_precision
def median_t(points: Tensor, *, mask: Tensor | None = None, most: int = 2048) -> Tensor:
    """Return an initial scale: t with Z = 1/e at the median distance, d / median of |k_j - k_l|^2 over pairs
    that differ.

    Of more than ``most`` points an evenly spaced selection is looked at. Sets without two different points
    get 1.

    >>> median_t(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))                               # 2 / 25
    tensor(0.0800)
    """
    checked = checked_points(points, 1.0, mask, "median_t")
    step = max(1, -(-checked.x.shape[1] // most))
    x = checked.x.detach()[:, ::step]
    squares = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square()  # t = 1: already over d
    pair = torch.ones_like(squares, dtype=torch.bool).triu(1) & (squares > 0)
    if checked.present is not None:
        there = checked.present[:, ::step]
        pair = pair & there[:, :, None] & there[:, None, :]
    middle = torch.where(pair, squares, torch.nan).flatten(1).nanmedian(-1).values
    return checked.shaped(torch.where(middle > 0, 1 / middle, 1.0))
