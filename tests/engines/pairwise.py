"""Parametrisation by samples of a grid: all pairs of values, or every other case."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Return ``parametrize`` with few cases that cover every pair of values, chosen greedily."""
    names = list(axes)
    cases = list(product(*(range(len(values)) for values in axes.values())))
    missing = set().union(*(pairs_of(case) for case in cases))
    chosen = []
    while missing:
        case = max(cases, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(case)
        chosen.append([axes[name][i] for name, i in zip(names, case, strict=True)])
    return pytest.mark.parametrize(names, chosen, ids=lambda x: str(x).split("(")[0] if callable(x) else None)


def every_other(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return all cases of two axes, of which every other one, as on a chessboard, is slow."""
    return [
        pytest.param(a, b, marks=[pytest.mark.slow] if (row + column) % 2 else [])
        for row, a in enumerate(first)
        for column, b in enumerate(second)
    ]


def pairs_of(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(case), 2))
