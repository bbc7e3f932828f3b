"""Intervals, matched controls and corrected tests for figures of many neurons."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Neighbouring tokens that are resampled together, since what follows in a text is not independent."""
ROUNDS = 1000
CONTROLS = 50
LEVEL = 0.05


@dataclass(frozen=True)
class Interval:
    """(neurons,) each: a figure, the ends of its 95 % interval, and its standard error, by bootstrap."""

    value: Tensor
    low: Tensor
    high: Tensor
    error: Tensor


class Bootstrap:
    """Resamples blocks of tokens; the same samples for every figure, so that figures can be compared.

    >>> found = Bootstrap(640, seed=0).mean(torch.randn(640, 1, generator=torch.Generator().manual_seed(1)))
    >>> bool(found.low < found.value < found.high)
    True
    """

    def __init__(self, tokens: int, seed: int, rounds: int = ROUNDS) -> None:
        self.block = min(BLOCK, max(1, tokens // 8))
        blocks = -(-tokens // self.block)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(blocks, (rounds, blocks), generator=generator)
        self.weights = torch.zeros(rounds, blocks).scatter_add_(1, drawn, torch.ones(rounds, blocks))
        self.tokens = tokens
        self._sizes = self._by_block(torch.ones(tokens, 1))

    def mean(self, values: Tensor) -> Interval:
        """Of values (tokens, neurons) their mean over tokens."""
        return self._interval(values.float().mean(0), self._means(values))

    def share(self, part: Tensor, whole: Tensor) -> Interval:
        """1 less the ratio of two means: which share of an effect is gone in another."""
        samples = 1 - self._means(part) / self._means(whole).clamp_min(1e-30)
        value = 1 - part.float().mean(0) / whole.float().mean(0).clamp_min(1e-30)
        return self._interval(value, samples)

    def _means(self, values: Tensor) -> Tensor:
        return (self.weights @ self._by_block(values.float())) / (self.weights @ self._sizes)

    def _by_block(self, values: Tensor) -> Tensor:
        missing = -self.tokens % self.block
        padded = torch.cat([values, values.new_zeros(missing, values.shape[1])])
        return padded.view(-1, self.block, values.shape[1]).sum(1)

    def _interval(self, value: Tensor, samples: Tensor) -> Interval:
        low, high = torch.quantile(samples, torch.tensor([0.025, 0.975]), dim=0)
        return Interval(value, low, high, samples.std(0))


def matched_controls(features: Tensor, eligible: Tensor, count: int, seed: int) -> Tensor:
    """(neurons, count): for each neuron random others that are like it.

    ``features`` (neurons, kinds) say in what; each is scaled by its spread. Drawn are ``count`` of the
    ``2 * count`` nearest that are ``eligible``, never the neuron itself.

    >>> x = torch.arange(6.0)[:, None]
    >>> matched_controls(x, torch.ones(6, dtype=torch.bool), 1, seed=0).shape
    torch.Size([6, 1])
    """
    scaled = (features - features.mean(0)) / features.std(0).clamp_min(1e-12)
    distance = torch.cdist(scaled, scaled)
    distance[:, ~eligible] = math.inf
    distance.fill_diagonal_(math.inf)
    pool = min(2 * count, int(eligible.sum()) - 1)
    nearest = distance.topk(pool, largest=False).indices
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(nearest.shape, generator=generator).topk(min(count, pool)).indices
    return nearest.gather(1, drawn)


@dataclass(frozen=True)
class Test:
    """(neurons,) each: how far a figure lies above those of its controls,
    and how likely that is by chance."""

    control: Tensor
    """Median of the controls."""
    spread: Tensor
    """How far they reach above it, as a standard deviation."""
    score: Tensor
    p: Tensor
    q: Tensor
    """``p`` corrected for the number of neurons by Benjamini and Hochberg."""


def above_controls(found: Interval, controls: Tensor) -> Test:
    """Is a figure larger than that of one more control would be? One-sided, by Student's t.

    The spread counts twice: among controls, and of the figure itself over tokens. Of the controls only those
    above their median tell how far up chance reaches: shares of small effects can be far below it.
    """
    values = found.value[controls]
    count = controls.shape[1]
    middle = values.quantile(0.5, dim=1)
    above = (values - middle[:, None]).clamp_min(0.0)
    spread = (2 * above.square().mean(1)).sqrt()
    error = (spread**2 * (1 + 1 / count) + found.error**2).sqrt().clamp_min(1e-12)
    score = (found.value - middle) / error
    p = student_tail(score, max(1, count // 2))
    return Test(middle, spread, score, p, benjamini_hochberg(p))


def student_tail(score: Tensor, freedom: int) -> Tensor:
    """The probability that Student's t exceeds ``score``, by Wallace's transformation to a normal variable.

    >>> [round(float(p), 4) for p in student_tail(torch.tensor([0.0, 2.0096]), 49)]
    [0.5, 0.025]
    """
    x = score.double()
    normal = (8 * freedom + 1) / (8 * freedom + 3) * (freedom * torch.log1p(x**2 / freedom)).sqrt()
    beyond: Tensor = torch.special.ndtr(-normal * x.sign())
    return beyond.float()


def benjamini_hochberg(p: Tensor) -> Tensor:
    """Smallest false discovery rate at which each test would be called significant.

    >>> [round(float(x), 3) for x in benjamini_hochberg(torch.tensor([0.01, 0.04, 0.03, 0.5]))]
    [0.04, 0.053, 0.053, 0.5]
    """
    order = p.argsort()
    ranks = torch.arange(1, len(p) + 1, dtype=p.dtype)
    raw = p[order] * len(p) / ranks
    smallest = raw.flip(0).cummin(0).values.flip(0).clamp_max(1.0)
    return torch.empty_like(p).scatter_(0, order, smallest)
