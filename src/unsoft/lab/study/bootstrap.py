"""Intervals from few numbers: the percentile bootstrap, over all resamples where they can be listed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from functools import lru_cache

_LISTED = 6
"""So many numbers have 6 ** 6 resamples, which are all taken; of more, so many are drawn:"""
_DRAWN = 20_000


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Between which the mean lies, by resampling; None for fewer than two numbers. The same numbers give the
    same interval.

    With five numbers it is too narrow: of normal ones it holds the true mean in 82 %, not 95 %
    (docs/studies.md), so a rule asks for a margin besides.

    >>> interval([1.0, 1.0, 1.0]), interval([3.0])
    ((1.0, 1.0), None)
    """
    return None if len(values) < 2 else _interval(tuple(values), level)


@lru_cache(maxsize=4096)
def _interval(values: tuple[float, ...], level: float) -> tuple[float, float]:
    """Kept, since tables, pages and verdicts ask for the same ones."""
    count = len(values)
    if count <= _LISTED:
        means = [math.fsum(chosen) / count for chosen in itertools.product(values, repeat=count)]
    else:
        draw = random.Random(0)
        means = [math.fsum(draw.choices(values, k=count)) / count for _ in range(_DRAWN)]
    means.sort()
    side = (1 - level) / 2
    return _quantile(means, side), _quantile(means, 1 - side)


def _quantile(ordered: Sequence[float], part: float) -> float:
    """With straight lines between neighbours."""
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
