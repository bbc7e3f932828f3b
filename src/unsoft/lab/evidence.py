"""Verdicts and confidence intervals, used by every page, claim and study.

A verdict is a word from :data:`VERDICTS`. An :class:`Estimate` is a mean with the ends of its 95 % confidence
interval. Which method to use depends on what was drawn:

- :func:`t_interval`: independent draws, also few of them, such as the seeds of a study (Student's t). A
  percentile bootstrap over five normal draws covers their mean in 82 % of cases, not in 95 %.
- :func:`censored_mean`: the same for draws of which some ended at a limit.
- :func:`resampled_mean`: many items, optionally of several draws (percentile bootstrap over both).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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

- supported, not supported: the measurements decide the rule that was written before them.
- partly supported: a part of the claim, or a weaker form that its rule names.
- undecided: the measurements are compatible with both, or too few.
- at ceiling: the baseline leaves less room than the rule's margin, so the rule could not pass.
- by construction: true by definition, so it is shown and never counted.
- not testable here, not run: there is no measurement, and the reason is given.
"""

LEVEL = 0.95
_EQUAL = 1e-12
"""Relative width of an interval below which its draws differ by rounding only."""
_T = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582),
    *(2.446912, 2.364624, 2.306004, 2.262157, 2.228139),
)
"""Quantiles of Student's t at 97.5 % for 1 to 10 degrees of freedom."""
_Z = 1.959964
_RESAMPLES = 2000


def grade(supported: bool, partly: bool = False) -> str:
    """Return the verdict of a test with an outcome between yes and no.

    >>> grade(True), grade(False, partly=True), grade(False)
    ('supported', 'partly supported', 'not supported')
    """
    return SUPPORTED if supported else PARTLY if partly else NOT_SUPPORTED


def worst(verdicts: Sequence[str]) -> str:
    """Return the verdict of several tests that must all hold.

    One test that is at ceiling cannot be passed, so it leaves the others without a say unless one fails.

    >>> worst([SUPPORTED, UNDECIDED]), worst([NOT_SUPPORTED, AT_CEILING]), worst([SUPPORTED])
    ('undecided', 'not supported', 'supported')
    """
    order = (NOT_SUPPORTED, AT_CEILING, UNDECIDED)
    return next((verdict for verdict in order if verdict in verdicts), SUPPORTED)


def between(low: float | None, high: float | None, digits: int = 3) -> str:
    """Return the ends of a confidence interval as text; "" if there is none.

    Draws that are all equal have an interval of width 0, which says that the quantity is constant or too
    coarse, not that it is certain. Ends that would read the same get more digits.

    >>> between(0.25, 0.5), between(0.25, 0.25), between(0.2501, 0.2502), between(None, None)
    ('0.250 to 0.500', 'all equal', '0.2501 to 0.2502', '')
    """
    if low is None or high is None:
        return ""
    if high - low <= _EQUAL * max(abs(low), abs(high)):
        return "all equal"
    while f"{low:.{digits}f}" == f"{high:.{digits}f}":
        digits += 1
    return f"{low:.{digits}f} to {high:.{digits}f}"


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
        if math.isinf(self.high):
            return f"≥ {self.value:.3g}"
        if between(self.low, self.high) == "all equal":
            return f"{self.value:.3g} (all equal)"
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def t_interval(values: Sequence[float], possible: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
    """Return the mean of independent draws with its interval by Student's t, valid for few draws too.

    The interval is clipped to the ``possible`` range of the quantity: an accuracy is never above 1.

    >>> print(t_interval([1.0, 2.0, 3.0]))
    2 (-0.484 to 4.48)
    >>> print(t_interval([1.0, 2.0, 3.0], possible=(0, 4)))
    2 (0 to 4)
    >>> print(t_interval([5.0]), t_interval([5.0, 5.0]))
    5 5 (all equal)
    """
    count = len(values)
    if not count:
        raise ValueError("t_interval: there are no values")
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean)
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (count - 1) / count)
    half = _student(count - 1) * error
    return Estimate(mean, max(mean - half, possible[0]), min(mean + half, possible[1]))


def censored_mean(values: Sequence[float | None], limit: float) -> Estimate:
    """Return the mean of draws that are never negative; None is one that ended at ``limit``.

    With such a draw the mean is a lower bound, so its interval has no upper end.

    >>> print(censored_mean([1.0, 2.0, 3.0], 64.0), censored_mean([2.0, None, 4.0], 63.0))
    2 (0 to 4.48) ≥ 23
    """
    mean = t_interval([limit if x is None or x >= limit else x for x in values], possible=(0.0, limit))
    is_bound = any(x is None or x >= limit for x in values)
    return Estimate(mean.value, mean.lower, math.inf) if is_bound else mean


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return how many times ``first`` is ``second``: the geometric mean over pairs, with its interval.

    >>> print(paired_ratio([2.0, 4.0], [1.0, 2.0]))
    2 (all equal)
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
