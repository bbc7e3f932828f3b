"""A number from several draws, with the interval in which it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 97.5 % for 1 to 10 degrees of freedom."""
_Z = 1.959964


class Estimate(NamedTuple):
    """A mean and its interval; without bounds if there was only one number."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3g}"
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent draws with a 95 % interval by Student's t, which is right for few draws too.

    >>> print(estimate([1.0, 2.0, 3.0]))
    2 (-0.484 to 4.48)
    >>> print(estimate([5.0]))
    5
    """
    count = len(values)
    if not count:
        raise ValueError("estimate: there are no values")
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (count - 1) / count)
    return Estimate(mean, mean - _student(count - 1) * spread, mean + _student(count - 1) * spread)


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """How many times ``first`` is ``second``, draw by draw: the geometric mean with its interval.

    >>> print(paired_ratio([2.0, 4.0], [1.0, 2.0]))
    2 (2 to 2)
    """
    if len(first) != len(second):
        raise ValueError(f"paired_ratio: {len(first)} draws against {len(second)}")
    found = estimate([math.log(a / b) for a, b in zip(first, second, strict=True)])
    return Estimate(*(None if x is None else math.exp(x) for x in found))  # type: ignore[arg-type]


def _student(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    cubic = (_Z**3 + _Z) / (4 * freedom)  # the expansion of Cornish and Fisher
    return _Z + cubic + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)
