"""Verdicts and confidence intervals, used by every page, claim and study.

A verdict is a word from :data:`VERDICTS`. An :class:`Estimate` is a mean with the ends of its 95 % confidence
interval. Which method to use depends on what was drawn:

- :func:`t_interval`: independent draws, also few of them (Student's t).
- :func:`bootstrap_interval`: seeds of a study (percentile bootstrap, exact for up to six values).
- :func:`resampled_mean`: many items, optionally of several draws (percentile bootstrap over both).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

SUPPORTED, PARTLY, NOT_SUPPORTED = "supported", "partly supported", "not supported"
UNDECIDED, AT_CEILING = "undecided", "at ceiling"
BY_CONSTRUCTION, NOT_TESTABLE, NOT_RUN = "by construction", "not testable here", "not run"
VERDICTS = {
    SUPPORTED: "yes",
    PARTLY: "partly",
    NOT_SUPPORTED: "no",
    UNDECIDED: "not-run",
    AT_CEILING: "not-run",
    BY_CONSTRUCTION: "not-run",
    NOT_TESTABLE: "not-run",
    NOT_RUN: "not-run",
}
"""Every verdict, with the CSS class of its mark on a page.

``at ceiling``: the baseline leaves less room than the rule's margin, so the rule could not pass.
"""

LEVEL = 0.95
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's t at 97.5 % for 1 to 10 degrees of freedom."""
_Z = 1.959964
_LISTED = 6
"""Up to this many values, the bootstrap enumerates all resamples: 6 ** 6 = 46,656."""
_DRAWN = 20_000
_RESAMPLES = 2000


def grade(supported: bool, partly: bool = False) -> str:
    """Return the verdict of a test with an outcome between yes and no.

    >>> grade(True), grade(False, partly=True), grade(False)
    ('supported', 'partly supported', 'not supported')
    """
    return SUPPORTED if supported else PARTLY if partly else NOT_SUPPORTED


def worst(verdicts: Sequence[str]) -> str:
    """Return the verdict of several tests that must all hold.

    >>> worst([SUPPORTED, UNDECIDED]), worst([NOT_SUPPORTED, UNDECIDED]), worst([SUPPORTED])
    ('undecided', 'not supported', 'supported')
    """
    return next((verdict for verdict in (NOT_SUPPORTED, UNDECIDED) if verdict in verdicts), SUPPORTED)


class Estimate(NamedTuple):
    """A mean with the ends of its 95 % confidence interval, which are None for a single value."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def lower(self) -> float:
        """The lower end of the interval, or the value itself without one."""
        return self.value if self.low is None else self.low

    @property
    def upper(self) -> float:
        """The upper end of the interval, or the value itself without one."""
        return self.value if self.high is None else self.high

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3g}"
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def t_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of independent draws with its interval by Student's t, valid for few draws too.

    >>> print(t_interval([1.0, 2.0, 3.0]))
    2 (-0.484 to 4.48)
    >>> print(t_interval([5.0]))
    5
    """
    count = len(values)
    if not count:
        raise ValueError("t_interval: there are no values")
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean)
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (count - 1) / count)
    return Estimate(mean, mean - _student(count - 1) * error, mean + _student(count - 1) * error)


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return how many times ``first`` is ``second``: the geometric mean over pairs, with its interval.

    >>> print(paired_ratio([2.0, 4.0], [1.0, 2.0]))
    2 (2 to 2)
    """
    if len(first) != len(second):
        raise ValueError(f"paired_ratio: {len(first)} draws against {len(second)}")
    logs = t_interval([math.log(a / b) for a, b in zip(first, second, strict=True)])
    return Estimate(*(None if x is None else math.exp(x) for x in logs))  # type: ignore[arg-type]


def _student(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    cubic = (_Z**3 + _Z) / (4 * freedom)  # Cornish-Fisher expansion around the normal quantile
    return _Z + cubic + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)


def bootstrap_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Return the percentile-bootstrap interval of a mean, or None for fewer than two values.

    The result is deterministic. With five values it is too narrow: for normal values it covers the true mean
    in 82 % of cases, not 95 % (docs/studies.md), so rules also require a margin.

    >>> bootstrap_interval([1.0, 1.0, 1.0]), bootstrap_interval([3.0])
    ((1.0, 1.0), None)
    """
    return None if len(values) < 2 else _bootstrap(tuple(values), level)


@lru_cache(maxsize=4096)
def _bootstrap(values: tuple[float, ...], level: float) -> tuple[float, float]:
    """Cached, because tables, pages and verdicts ask for the same intervals."""
    count = len(values)
    if count <= _LISTED:
        means = [math.fsum(chosen) / count for chosen in itertools.product(values, repeat=count)]
    else:
        draw = random.Random(0)
        means = [math.fsum(draw.choices(values, k=count)) / count for _ in range(_DRAWN)]
    means.sort()
    tail = (1 - level) / 2
    return _quantile(means, tail), _quantile(means, 1 - tail)


def _quantile(ordered: Sequence[float], part: float) -> float:
    """Return a quantile by linear interpolation between neighbours."""
    index = part * (len(ordered) - 1)
    below = math.floor(index)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (index - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True)
class MeanInterval:
    """The mean of many items with the ends of its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def resampled_mean(values: Tensor, seed: int = 0) -> MeanInterval:
    """Return the mean of items (n,), or of draws and items (draws, n), resampling both.

    >>> import torch
    >>> found = resampled_mean(torch.arange(100.0))
    >>> found.mean, 40 < found.low < 49.5 < found.high < 60
    (49.5, True)
    """
    import torch

    values = torch.atleast_2d(values.double())
    if values.numel() == 0 or not bool(values.isfinite().all()):
        raise ValueError("resampled_mean: there must be at least one measurement, and all of them finite")
    draws, items = values.shape
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(draws, (_RESAMPLES, draws, 1), generator=generator)
    columns = torch.randint(items, (_RESAMPLES, 1, items), generator=generator)
    return _percentiles(values.mean(), values[rows, columns].mean((1, 2)))


def resampled_ratio_change(
    above: Tensor, below: Tensor, new_above: Tensor, new_below: Tensor, seed: int = 0
) -> MeanInterval:
    """Return the change of a ratio of sums over items, resampling items with all four numbers.

    >>> import torch
    >>> ones = torch.ones(10)
    >>> resampled_ratio_change(ones, 2 * ones, ones, 4 * ones)
    MeanInterval(mean=-0.25, low=-0.25, high=-0.25)
    """
    import torch

    table = torch.stack([above, below, new_above, new_below]).double()
    items = table.shape[1]
    drawn = torch.randint(items, (_RESAMPLES, items), generator=torch.Generator().manual_seed(seed))
    sums = table[:, drawn].sum(-1)
    whole = table.sum(-1)
    return _percentiles(whole[2] / whole[3] - whole[0] / whole[1], sums[2] / sums[3] - sums[0] / sums[1])


def _percentiles(value: Tensor, resampled: Tensor) -> MeanInterval:
    tail = (1 - LEVEL) / 2
    low, high = resampled.quantile(resampled.new_tensor([tail, 1 - tail])).tolist()
    return MeanInterval(value.item(), low, high)
