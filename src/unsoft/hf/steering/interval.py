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
    means = values[rows, columns].mean((1, 2))
    tail = (1 - _LEVEL) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(values.mean().item(), low, high)
