"""Means with intervals: percentile bootstrap over items, and over draws where there are several."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_RESAMPLES, _LEVEL = 2000, 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and the 95 % interval around it."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def interval(values: Tensor, seed: int = 0) -> Interval:
    """Of items (n,), or of draws and items (draws, n), both of which are drawn again.

    >>> found = interval(torch.arange(100.0))
    >>> found.mean, 40 < found.low < 49.5 < found.high < 60
    (49.5, True)
    """
    values = torch.atleast_2d(values.double())
    if values.numel() == 0 or not bool(values.isfinite().all()):
        raise ValueError("steer: there must be at least one measurement, and all of them finite")
    draws, items = values.shape
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(draws, (_RESAMPLES, draws, 1), generator=generator)
    columns = torch.randint(items, (_RESAMPLES, 1, items), generator=generator)
    return _around(values.mean(), values[rows, columns].mean((1, 2)))


def ratio_change(
    above: Tensor, below: Tensor, new_above: Tensor, new_below: Tensor, seed: int = 0
) -> Interval:
    """How much a ratio of sums over the same items changes; items are drawn again with all four numbers.

    >>> ones = torch.ones(10)
    >>> ratio_change(ones, 2 * ones, ones, 4 * ones)
    Interval(mean=-0.25, low=-0.25, high=-0.25)
    """
    table = torch.stack([above, below, new_above, new_below]).double()
    items = table.shape[1]
    drawn = torch.randint(items, (_RESAMPLES, items), generator=torch.Generator().manual_seed(seed))
    sums = table[:, drawn].sum(-1)
    whole = table.sum(-1)
    return _around(whole[2] / whole[3] - whole[0] / whole[1], sums[2] / sums[3] - sums[0] / sums[1])


def _around(value: Tensor, resampled: Tensor) -> Interval:
    tail = (1 - _LEVEL) / 2
    low, high = resampled.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(value.item(), low, high)
