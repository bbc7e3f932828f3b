"""Which mechanisms charts show at first, and the colour and dash of each: told apart by colour-blind readers too."""

from __future__ import annotations

from collections.abc import Sequence

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")
"""Okabe and Ito's, with their black and yellow, which one of the two themes would hide, replaced."""
DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2))
_FIRST = ("softmax", "cog", "relu2", "sigmoid", "identity", "gpam", "linear-relu", "magnitude")


def ordered(labels: Sequence[str], own: Sequence[str] = ()) -> list[str]:
    """The order in which colours are given: what users wrote themselves, then the best known, then the rest.

    >>> ordered(["tanh", "cog", "softmax", "mine"], own=["mine"])
    ['mine', 'softmax', 'cog', 'tanh']
    """
    return list(dict.fromkeys((*own, *(label for label in _FIRST if label in labels), *labels)))


def shown_at_first(labels: Sequence[str]) -> list[str]:
    """As many as there are colours."""
    return list(labels[: len(PALETTE)])


def colour_of(labels: Sequence[str]) -> dict[str, str]:
    return {label: PALETTE[k % len(PALETTE)] for k, label in enumerate(labels)}


def dash_of(labels: Sequence[str]) -> dict[str, list[int]]:
    return {label: list(DASHES[k // len(PALETTE) % len(DASHES)]) for k, label in enumerate(labels)}
