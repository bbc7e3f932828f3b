"""Numbers that a user gives to a run, checked before any work."""

from __future__ import annotations

import math
from typing import Any


def check_whole(who: str, name: str, value: Any, minimum: int) -> None:
    """TypeError or ValueError unless ``value`` is a whole number that large, or None.

    >>> check_whole("train", "steps", 0, 1)
    Traceback (most recent call last):
    ValueError: train: 'steps' must be at least 1, not 0
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{who}: {name!r} must be a whole number, not {value!r}")
    if value < minimum:
        raise ValueError(f"{who}: {name!r} must be at least {minimum}, not {value}")


def check_number(who: str, name: str, value: Any) -> None:
    """TypeError or ValueError unless ``value`` is a number of at least 0, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{who}: {name!r} must be a number, not {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{who}: {name!r} must be a number of at least 0, not {value}")


def check_seed(who: str, seed: Any) -> None:
    """TypeError or ValueError unless ``seed`` is one that every generator of random numbers takes."""
    check_whole(who, "seed", seed, 0)
    if seed >= 1 << 32:
        raise ValueError(f"{who}: 'seed' must be less than 2**32, not {seed}")
