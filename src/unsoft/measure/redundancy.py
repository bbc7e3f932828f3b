"""Hijacking. Crowds of near-duplicate keys are compared with their magnitude (Rosić 2026)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.measure.arguments import check_broadcast, check_float, check_mask, check_per_key, computed
from unsoft.measure.rows import WeightRows, over_rows, ratio


class Hijack(NamedTuple):
    """One number for each row."""

    attention_share: Tensor
    """Fraction of the row's mass on keys of redundant groups."""
    magnitude_share: Tensor
    """Fraction of these groups in the magnitude of the keys that the row sees: what they are worth."""
    excess: Tensor
    """The difference: above 0 crowds take more than they are worth, at 0 nothing is hijacked."""


def key_groups(keys: Tensor, mask: Tensor | None = None, *, t: float = 1.0, threshold: float = 0.5) -> Tensor:
    """The group of each key, as the position of the group's first key.

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
    groups = keys.new_zeros(sets, count, dtype=torch.long)
    for number, x in enumerate(points.reshape(sets, count, dim)):
        near = _within(x, reach)
        if mask is not None:
            exists = mask.reshape(sets, count)[number]
            near &= exists & exists[:, None]
        groups[number] = components(near[None])[0]
    return groups.reshape(*lead, count)


def hijack(
    weights: Tensor,
    keys: Tensor,
    mask: Tensor | None = None,
    *,
    t: float = 1.0,
    threshold: float = 0.5,
    eps: float = 1e-2,
    magnitude_weights: Tensor | None = None,
) -> Hijack:
    """Attention on redundant groups of keys, against their share of the set's magnitude.

        attention_share = sum of |a_j| over j in redundant groups / sum |a|
        magnitude_share = sum of mu_j over j in redundant groups / sum mu        (Z + eps I) mu = 1
        excess = attention_share - magnitude_share

    Groups are those of :func:`key_groups` among the keys that any row sees, redundant if the row sees two or
    more of their keys. ``weights`` is (..., queries, keys), ``keys`` (..., keys, d) with leading dimensions
    that broadcast to those of the weights. The magnitude weights mu come from
    :func:`unsoft.magnitude.weighting`, or from ``magnitude_weights``, (..., keys) or (..., queries, keys). If
    the mask differs from row to row, so does the set whose magnitude counts, and ``magnitude_weights`` must
    be given: for causal rows ``unsoft.magnitude.prefix_weighting(keys).weights``.

    Answers: do many copies of a key take attention that one copy would not get?

    Range: attention_share 0 to 1; the other two usually in -1 to 1, but magnitude weights can be negative.
    Rows without redundant groups: 0 everywhere.

    >>> keys = torch.tensor([[9.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])  # one unique key, three clones
    >>> flat = torch.full((1, 4), 0.25)
    >>> hijack(flat, keys, magnitude_weights=torch.tensor([1.0, 1 / 3, 1 / 3, 1 / 3]))
    Hijack(attention_share=tensor([0.7500]), magnitude_share=tensor([0.5000]), excess=tensor([0.2500]))
    """
    check_float("weights", weights, 2, "(..., queries, keys)")
    check_float("keys", keys, 2, "(..., keys, d)")
    check_mask("mask", mask, weights.shape, weights.device)
    check_per_key("keys", keys, weights)
    per_row = mask is not None and _differs_between_rows(mask)
    exists = None
    if mask is not None:
        exists = mask.expand(weights.shape).any(-2)
        keys = keys.expand(*weights.shape[:-2], *keys.shape[-2:])
    if magnitude_weights is None:
        if per_row:
            raise ValueError(
                "measure: argument 'mask' differs from row to row, and so does the magnitude of what a row"
                " sees: pass 'magnitude_weights' of shape (..., queries, keys), for causal rows"
                " unsoft.magnitude.prefix_weighting(keys, t=t, eps=eps).weights"
            )
        from unsoft.magnitude import weighting  # only here: its solvers are not needed otherwise

        magnitude_weights = weighting(keys, t=t, eps=eps, mask=exists).weights
    worth = _by_row(magnitude_weights, weights)
    groups = key_groups(keys, exists, t=t, threshold=threshold)
    if per_row:
        shares = over_rows(_shares_by_row, weights, mask, groups[..., None, :], worth)
        attention_share, magnitude_share = shares.unbind(-1)
    else:
        redundant = redundant_keys(groups, exists)[..., None, :]
        attention_share = over_rows(_attention_share, weights, mask, redundant)
        visible = None if exists is None else exists[..., None, :]
        magnitude_share = magnitude_share_of(worth, visible, redundant).expand(attention_share.shape)
    return Hijack(attention_share, magnitude_share, attention_share - magnitude_share)


def _differs_between_rows(mask: Tensor) -> bool:
    return mask.dim() > 1 and not torch.equal(mask, mask[..., :1, :].expand_as(mask))


def _by_row(magnitude_weights: Tensor, weights: Tensor) -> Tensor:
    """Return magnitude weights (..., 1 or queries, keys); with fewer dimensions than weights: no queries."""
    check_float("magnitude_weights", magnitude_weights, 1, "(..., keys) or (..., queries, keys)")
    worth = computed(magnitude_weights)
    if worth.dim() < weights.dim():
        worth = worth[..., None, :]
    check_broadcast("magnitude_weights", worth, weights.shape)
    return worth


def redundant_keys(groups: Tensor, visible: Tensor | None) -> Tensor:
    """Return which keys lie in a group of which two or more keys are visible."""
    visible = torch.ones_like(groups, dtype=torch.bool) if visible is None else visible
    members = torch.zeros_like(groups).scatter_add(-1, groups, visible.long())
    return members.gather(-1, groups) > 1


def _attention_share(block: Tensor, visible: Tensor | None, redundant: Tensor) -> Tensor:
    """Return the share of the mass on keys that are ``redundant`` (bool, broadcasts to the rows)."""
    rows = WeightRows(block, visible)
    return rows.per_mass((rows.relative * redundant).sum(-1))


def magnitude_share_of(worth: Tensor, visible: Tensor | None, redundant: Tensor) -> Tensor:
    """Return the share of magnitude weights (..., keys) on keys that are ``redundant``."""
    values = WeightRows(worth, visible).values
    return ratio((values * redundant).sum(-1), values.sum(-1))


def _shares_by_row(block: Tensor, visible: Tensor, groups: Tensor, worth: Tensor) -> Tensor:
    redundant = redundant_keys(groups, visible)
    attention_share = _attention_share(block, visible, redundant)
    magnitude_share = magnitude_share_of(worth, visible, redundant)
    return torch.stack([attention_share, magnitude_share.to(attention_share.dtype)], -1)


def _within(points: Tensor, reach: float) -> Tensor:
    """Return which pairs have a squared distance |x_j|^2 - 2 x_j . x_l + |x_l|^2 below ``reach``.

    One product of matrices, which saves passes over the result.
    """
    points = points - points.mean(0)
    squares = points.square().sum(-1, keepdim=True)
    ones = torch.ones_like(squares)
    left, right = torch.cat([-2 * points, squares, ones], -1), torch.cat([points, ones, squares], -1)
    # The distance of two clones far from the mean is a small difference of large numbers. Otherwise float32
    # is exact enough.
    if not (squares > 1000 * reach).any():
        left, right = left.float(), right.float()
    return left @ right.mT < reach


def components(near: Tensor) -> Tensor:
    """Return the lowest member of each key's connected component, for symmetric relations (sets, keys, keys).

    >>> components(torch.tensor([[[1, 0, 1], [0, 1, 0], [1, 0, 1]]]))
    tensor([[0, 1, 0]])
    """
    sets, count, _ = near.shape
    labels = torch.arange(sets * count, device=near.device)
    left, right = (near.flatten(0, 1).nonzero()).unbind(-1)
    right = right + left // max(count, 1) * count  # keys of all sets are numbered through
    while True:
        lowest = labels.scatter_reduce(0, left, labels[right], "amin")
        # Pointer jumping: the label that a key had until now is replaced by the lowest label among its
        # neighbours, and so on up, so that a chain of n keys needs about log n rounds instead of n.
        merged = labels.scatter_reduce(0, labels, lowest, "amin")
        while not torch.equal(merged, followed := merged[merged]):
            merged = followed
        if torch.equal(merged, labels):
            return labels.view(sets, count) % max(count, 1)
        labels = merged
