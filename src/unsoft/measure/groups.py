"""Which keys say the same? Groups of keys, found from their geometry."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unsoft.measure.arguments import check_float, check_mask

__all__ = ["key_groups"]


def key_groups(keys: Tensor, mask: Tensor | None = None, *, t: float = 1.0, threshold: float = 0.5) -> Tensor:
    """For each key the number of its group, which is the position of the group's first key.

        Z_jl = exp(-t |k_j - k_l|^2 / d) > threshold        groups = connected components of this relation

    Connected components do not depend on the order of the keys, as clusters around leaders would. A long
    chain of near keys becomes one group; :func:`hijack` compares groups with their magnitude, which counts
    such a chain as many. ``keys`` is (..., keys, d), ``mask`` (..., keys) says which keys exist; a hidden key
    is a group of its own. Memory is one matrix keys x keys.

    Answers: which keys are redundant, seen at the resolution t?

    Range: whole numbers from 0 to keys - 1.

    >>> key_groups(torch.tensor([[0.0], [5.0], [0.1], [5.1]]))
    tensor([0, 1, 0, 1])
    """
    check_float("keys", keys, 2, "(..., keys, d)")
    check_mask("mask", mask, keys.shape[:-1], keys.device)
    if not t > 0:
        raise ValueError(f"measure: argument 't' is {t}; it must be positive")
    if not 0 < threshold < 1:
        raise ValueError(
            f"measure: argument 'threshold' is {threshold}; similarities to compare with lie between 0 and 1"
        )
    lead, (count, dim) = keys.shape[:-2], keys.shape[-2:]
    points = keys.detach().double()
    if mask is not None:
        mask = mask.expand(keys.shape[:-1])
        points = torch.where(mask[..., None], points, 0.0)
    if not points.isfinite().all():
        raise ValueError("measure: argument 'keys' holds NaN or infinite numbers where keys are visible")
    reach = -math.log(threshold) / t * dim
    sets = math.prod(lead)
    found = []
    for number, x in enumerate(points.reshape(sets, count, dim)):
        near = _within(x, reach)
        if mask is not None:
            exists = mask.reshape(sets, count)[number]
            near &= exists & exists[:, None]
        found.append(_components(near))
    return (
        torch.stack(found).reshape(*lead, count) if found else keys.new_zeros(*lead, count, dtype=torch.long)
    )


def _within(points: Tensor, reach: float) -> Tensor:
    """Which pairs have a squared distance |x_j|^2 - 2 x_j . x_l + |x_l|^2 below ``reach``.

    One product of matrices, which saves passes over the result.
    """
    points = points - points.mean(0)
    squares = points.square().sum(-1, keepdim=True)
    ones = torch.ones_like(squares)
    left, right = torch.cat([-2 * points, squares, ones], -1), torch.cat([points, ones, squares], -1)
    # The distance of two clones far out is a small difference of large numbers;
    # otherwise half the digits will do.
    if not (squares > 1000 * reach).any():
        left, right = left.float(), right.float()
    return left @ right.mT < reach


def _components(near: Tensor) -> Tensor:
    """Lowest member of each key's connected component, for a symmetric relation (keys, keys)."""
    count = len(near)
    labels = torch.arange(count, device=near.device)
    left, right = near.nonzero().unbind(-1)
    while True:
        lowest = labels.scatter_reduce(0, left, labels[right], "amin")
        # Whoever led a key until now follows the lowest label that the key has met, and so on to the top:
        # a chain of n keys needs about log n rounds instead of n.
        merged = labels.scatter_reduce(0, labels, lowest, "amin")
        while not torch.equal(merged, followed := merged[merged]):
            merged = followed
        if torch.equal(merged, labels):
            return labels
        labels = merged
