"""Crowds of look-alike keys: how many different keys does a head have, and what are the crowds worth?

The groups are those of :func:`unsoft.measure.key_groups`, the worth that of :func:`unsoft.measure.hijack`,
both with their default resolution t = 1. What rows need is computed once for each key head, not for each row
and query head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.lab.interpret.inspection.visible import Visible
from unsoft.magnitude import prefix_weighting, weighting
from unsoft.measure import key_groups
from unsoft.measure.redundancy import magnitude_share_of, redundant_keys

EPS = 1e-2
SAMPLED_ROWS = 4
"""Rows whose sets of keys are solved one by one where the mask is neither full nor causal."""


@dataclass(frozen=True)
class Crowds:
    """Of the keys (key heads, n, dim) of one sequence."""

    groups: Tensor
    """(key heads,): how many groups of alike keys there are."""
    magnitude: Tensor
    """(key heads,): the effective number of all n keys."""
    rows: Tensor
    """Numbers of the rows that are compared."""
    redundant: Tensor
    """Bool (key heads, rows or 1, n): keys in a group of which the row sees two or more."""
    magnitude_share: Tensor
    """(key heads, rows): what the redundant groups are worth."""


def find_crowds(keys: Tensor, visible: Visible) -> Crowds:
    """
    >>> keys = torch.tensor([[[9.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])  # one unique, three clones
    >>> found = find_crowds(keys, Visible("full", None))
    >>> found.groups, found.redundant[0, 0]
    (tensor([2]), tensor([False,  True,  True,  True]))
    """
    n = keys.shape[-2]
    labels = key_groups(keys)
    members = (labels == torch.arange(n, device=keys.device)).sum(-1)
    every = torch.arange(n, device=keys.device)
    if visible.table is None:
        found = weighting(keys, eps=EPS)
        redundant = redundant_keys(labels, None)[:, None]
        share = magnitude_share_of(found.weights[:, None], None, redundant)
        return Crowds(members, found.magnitude, every, redundant, share.expand(-1, n))
    if visible.kind == "causal":
        # A group becomes redundant when its second key arrives.
        redundant = every[:, None] >= _second(labels)[:, None, :]
        shares, magnitudes = [], []
        for head, points in enumerate(keys):  # the weights of all prefixes are n x n numbers
            prefixes = prefix_weighting(points, eps=EPS)
            shares.append(magnitude_share_of(prefixes.weights, visible.table[0], redundant[head]))
            magnitudes.append(prefixes.magnitude[-1])
        return Crowds(members, torch.stack(magnitudes), every, redundant, torch.stack(shares))
    table = visible.table[0]
    choice = (table.sum(-1) > 1).nonzero()[:, 0]
    rows = choice[torch.linspace(0, max(len(choice) - 1, 0), min(SAMPLED_ROWS, len(choice))).long()]
    seen = table[rows].expand(len(keys), -1, -1)
    redundant = redundant_keys(labels[:, None].expand(-1, len(rows), -1), seen)
    worth = weighting(keys[:, None].expand(-1, len(rows), -1, -1), eps=EPS, mask=seen).weights
    whole = weighting(keys, eps=EPS).magnitude
    return Crowds(members, whole, rows, redundant, magnitude_share_of(worth, seen, redundant))


def _second(groups: Tensor) -> Tensor:
    """For each key the position of the second member of its group; n if there is none.

    >>> _second(torch.tensor([[0, 1, 0, 0]]))
    tensor([[2, 4, 2, 2]])
    """
    n = groups.shape[-1]
    positions = torch.arange(n, device=groups.device).expand_as(groups)
    followers = torch.where(
        positions == groups, n, positions
    )  # the first member of a group gives it its number
    return torch.full_like(groups, n).scatter_reduce(-1, groups, followers, "amin").gather(-1, groups)
