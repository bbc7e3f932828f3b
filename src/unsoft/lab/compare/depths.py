"""States of a network by depth: does its input evolve, collapse or drown in noise? With intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.compare.stack import measured, moved
from unsoft.lab.evidence import Estimate

FIELDS = ("rank", "decoded", "moved")
KEPT, LOST, MOVED = 0.5, 0.1, 0.1
"""A rank, or a share of the input, counts as kept from a half on and as lost below a tenth of what it was;
states count as moved from a tenth on."""


def by_depth(states: Sequence[Tensor], folds: int = 4) -> list[dict[str, list[float]]]:
    """Of states (sequences, tokens, width) before the first layer and after each: effective rank, share of
    the input that can be decoded, and how far they have moved; one number for each of ``folds`` parts of the
    sequences, which is held out in turn.

    >>> tokens = torch.randn(8, 32, 8, generator=torch.Generator().manual_seed(0))
    >>> start, noise = by_depth([tokens, torch.randn(8, 32, 8)])
    >>> min(start["decoded"]) > 0.9 > 0.1 > max(noise["decoded"]), min(noise["rank"]) > 0.9
    (True, True)
    """
    inputs = states[0].double()
    if len(inputs) < folds:
        raise ValueError(f"depths: {len(inputs)} sequences cannot be cut into {folds} parts")
    part = len(inputs) // folds
    found: list[dict[str, list[float]]] = []
    for here in states:
        rows: list[dict[str, Any]] = []
        for fold in range(folds):
            order = torch.arange(len(inputs)).roll(part * fold)  # the last are held out
            there, first = here.double()[order], inputs[order]
            whole = measured(there, first, len(inputs) - part)
            rows.append(whole | {"moved": moved(there[-part:], first[-part:])})
        found.append({field: [row[field] for row in rows] for field in FIELDS})
    return found


def word(rank: Estimate, decoded: Estimate, moved: Estimate) -> str:
    """What has become of the input, by means: evolution, collapse, noise, or something between.

    >>> [word(*map(Estimate, given)) for given in ((0.9, 0.7, 0.5), (0.9, 0.01, 1.0), (0.1, 0.3, 0.9))]
    ['evolution', 'noise', 'collapse']
    """
    if moved.value < MOVED:
        return "unmoved"
    if rank.value < KEPT:
        return "collapse"
    if decoded.value < LOST:
        return "noise"
    return "evolution" if decoded.value >= KEPT else "between evolution and noise"
