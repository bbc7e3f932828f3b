"""Is it hijacked?

Crowds of look-alike keys against what they are worth (Rosić, 2026, "magnitude attention").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.measure.arguments import (
    check_broadcast,
    check_count,
    check_float,
    check_leading,
    check_mask,
    computed,
    row_weights,
)
from unsoft.measure.groups import key_groups
from unsoft.measure.rows import Rows, over_rows, ratio

__all__ = ["Hijack", "hijack", "unique_share"]


class Hijack(NamedTuple):
    """One number for each row."""

    attention_share: Tensor
    """Of the row's mass, the part on keys of redundant groups."""
    magnitude_share: Tensor
    """Of the magnitude of the keys that the row sees, the part of these groups: what they are worth."""
    excess: Tensor
    """The difference: above 0 crowds take more than they are worth, at 0 nothing is hijacked."""


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
    if keys.shape[-2] != weights.shape[-1]:
        raise ValueError(
            f"measure: argument 'keys' has shape {tuple(keys.shape)}, 'weights' {tuple(weights.shape)}; keys"
            f" need one row for each of the {weights.shape[-1]} keys"
        )
    check_leading("keys", keys, weights)
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


def unique_share(
    mechanism: Any, clones: Sequence[int], *, unique: float = 1 + math.log(20), clone: float = 1.0
) -> Tensor:
    """What a unique key keeps of the mass as clones of another key become more.

        |a_unique| / sum |a|        of the row  unique, clone, clone, ..., clone

    ``unique`` and ``clone`` are logits; with the defaults exp says that the unique key is 20 times as
    relevant as each clone, the example of the literature. (Clones with the logit 0 would hold nothing under
    many signed mechanisms.) The result has one number for each number of ``clones``. ``mechanism`` is a
    :class:`unsoft.Formula` or a function from logits to weights.

    Answers: how many mediocre copies does it take to drown a relevant key?

    Range: 0 to 1; a row without mass: 0.

    >>> from unsoft.formula import Formula
    >>> unique_share(Formula("exp(s - m)", "exp(s - m)", "s"), [0, 1, 50])        # 20/20, 20/21, 20/70
    tensor([1.0000, 0.9524, 0.2857], dtype=torch.float64)
    """
    weigh = row_weights(mechanism)
    shares = []
    for count in clones:
        check_count("clones", count, 0)
        row = weigh(torch.tensor([unique] + [clone] * count, dtype=torch.float64)).abs()
        shares.append(ratio(row[0], row.sum()))
    return torch.stack(shares) if shares else torch.zeros(0, dtype=torch.float64)


def _differs_between_rows(mask: Tensor) -> bool:
    return mask.dim() > 1 and not torch.equal(mask, mask[..., :1, :].expand_as(mask))


def _by_row(magnitude_weights: Tensor, weights: Tensor) -> Tensor:
    """(..., 1 or queries, keys): a tensor that begins like the weights without queries has none."""
    check_float("magnitude_weights", magnitude_weights, 1, "(..., keys) or (..., queries, keys)")
    given = computed(magnitude_weights)
    if given.dim() < weights.dim():
        given = given[..., None, :]
    check_broadcast("magnitude_weights", given, weights.shape)
    return given


def redundant_keys(groups: Tensor, visible: Tensor | None) -> Tensor:
    """Which keys lie in a group of which two or more keys are visible."""
    visible = torch.ones_like(groups, dtype=torch.bool) if visible is None else visible
    members = torch.zeros_like(groups).scatter_add(-1, groups, visible.long())
    return members.gather(-1, groups) > 1


def _attention_share(block: Tensor, visible: Tensor | None, redundant: Tensor) -> Tensor:
    return attention_share_of(Rows(block, visible), redundant)


def attention_share_of(rows: Rows, redundant: Tensor) -> Tensor:
    """Share of the mass on keys that are ``redundant`` (bool, broadcasts to the rows)."""
    return rows.per_mass((rows.relative * redundant).sum(-1))


def magnitude_share_of(worth: Tensor, visible: Tensor | None, redundant: Tensor) -> Tensor:
    """Share of magnitude weights (..., keys) on keys that are ``redundant``."""
    values = Rows(worth, visible).values
    return ratio((values * redundant).sum(-1), values.sum(-1))


def _shares_by_row(block: Tensor, visible: Tensor, groups: Tensor, worth: Tensor) -> Tensor:
    redundant = redundant_keys(groups, visible)
    attention_share = _attention_share(block, visible, redundant)
    magnitude_share = magnitude_share_of(worth, visible, redundant)
    return torch.stack([attention_share, magnitude_share.to(attention_share.dtype)], -1)
