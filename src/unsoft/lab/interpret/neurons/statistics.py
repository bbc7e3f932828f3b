"""Records of every neuron from measurements at every token: means, confidence intervals, matched controls,
and tests corrected for the number of neurons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.interpret.neurons.effects import Effects
from unsoft.lab.interpret.neurons.result import TOP
from unsoft.lab.interpret.neurons.weights import NeuronWeights

BLOCK = 32
"""Neighbouring tokens that are resampled together, since they are not independent."""
ROUNDS = 1000
CONTROLS = 50


@dataclass(frozen=True)
class NeuronEstimates:
    """(neurons,) each: a figure, the ends of its 95 % confidence interval, and its standard error."""

    value: Tensor
    low: Tensor
    high: Tensor
    error: Tensor

    def columns(self, name: str) -> dict[str, Tensor]:
        """Return the figure and the ends of its interval under their names in records."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


class Bootstrap:
    """Block bootstrap over tokens, with the same samples for every figure so that they can be compared.

    >>> values = torch.randn(640, 1, generator=torch.Generator().manual_seed(1))
    >>> mean = Bootstrap(640, seed=0).mean(values)
    >>> bool(mean.low < mean.value < mean.high)
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

    def mean(self, values: Tensor) -> NeuronEstimates:
        """Estimate the mean over tokens of values (tokens, neurons)."""
        return self._interval(values.float().mean(0), self._means(values))

    def share(self, part: Tensor, whole: Tensor) -> NeuronEstimates:
        """Estimate 1 minus the ratio of two means: the share of an effect that is absent in another."""
        samples = 1 - self._means(part) / self._means(whole).clamp_min(1e-30)
        value = 1 - part.float().mean(0) / whole.float().mean(0).clamp_min(1e-30)
        return self._interval(value, samples)

    def _means(self, values: Tensor) -> Tensor:
        return (self.weights @ self._by_block(values.float())) / (self.weights @ self._sizes)

    def _by_block(self, values: Tensor) -> Tensor:
        missing = -self.tokens % self.block
        padded = torch.cat([values, values.new_zeros(missing, values.shape[1])])
        return padded.view(-1, self.block, values.shape[1]).sum(1)

    def _interval(self, value: Tensor, samples: Tensor) -> NeuronEstimates:
        low, high = torch.quantile(samples, torch.tensor([0.025, 0.975]), dim=0)
        return NeuronEstimates(value, low, high, samples.std(0))


def matched_controls(features: Tensor, eligible: Tensor, count: int, seed: int) -> Tensor:
    """Draw for each neuron random similar ones; return (neurons, count).

    Similarity is by ``features`` (neurons, kinds), each scaled by its spread. ``count`` of the ``2 * count``
    nearest ``eligible`` neurons are drawn, never the neuron itself.

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


def above_controls(estimates: NeuronEstimates, controls: Tensor) -> dict[str, Tensor]:
    """Test one-sided, by Student's t, whether a figure is larger than that of one more control.

    Return (neurons,) each: ``control``, the median of the controls; ``control_spread``, their standard
    deviation above it; ``score``, how far the figure lies above; its probability ``p``; and ``q``, that
    corrected for the number of neurons by Benjamini and Hochberg.
    """
    values = estimates.value[controls]
    count = controls.shape[1]
    middle = values.quantile(0.5, dim=1)
    # Shares of small effects can be far below the median, so only controls above it define the spread.
    above = (values - middle[:, None]).clamp_min(0.0)
    spread = (2 * above.square().mean(1)).sqrt()
    # Two independent terms: the distance of one more control from the mean of count controls, and the
    # uncertainty of the figure itself over tokens.
    error = (spread**2 * (1 + 1 / count) + estimates.error**2).sqrt().clamp_min(1e-12)
    score = (estimates.value - middle) / error
    p = student_tail(score, max(1, count // 2))  # half of the controls lie above the median
    q = benjamini_hochberg(p)
    return {"control": middle, "control_spread": spread, "score": score, "p": p, "q": q}


def student_tail(score: Tensor, freedom: int) -> Tensor:
    """Return the probability that Student's t exceeds ``score``, by Wallace's normal approximation.

    >>> [round(float(p), 4) for p in student_tail(torch.tensor([0.0, 2.0096]), 49)]
    [0.5, 0.025]
    """
    x = score.double()
    normal = (8 * freedom + 1) / (8 * freedom + 3) * (freedom * torch.log1p(x**2 / freedom)).sqrt()
    beyond: Tensor = torch.special.ndtr(-normal * x.sign())
    return beyond.float()


def benjamini_hochberg(p: Tensor) -> Tensor:
    """Return the smallest false discovery rate at which each test would be significant.

    >>> [round(float(x), 3) for x in benjamini_hochberg(torch.tensor([0.01, 0.04, 0.03, 0.5]))]
    [0.04, 0.053, 0.053, 0.5]
    """
    order = p.argsort()
    ranks = torch.arange(1, len(p) + 1, dtype=p.dtype)
    raw = p[order] * len(p) / ranks
    smallest = raw.flip(0).cummin(0).values.flip(0).clamp_max(1.0)
    return torch.empty_like(p).scatter_(0, order, smallest)


def neuron_records(
    layer: int, weights: NeuronWeights, activations: Tensor, effects: Effects, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return a record per neuron, and the controls (neurons, count) of each role as indices of the list."""
    bootstrap = Bootstrap(len(activations), seed)
    features = matching_features(weights.norm, activations)
    figures: dict[str, Tensor] = {
        "norm": weights.norm,
        "rho": weights.rho,
        "rho_place": rank_of(weights.rho),
        "logit_variance": weights.logit_variance,
        "frequency_cosine": weights.frequency_cosine,
        "frequency_cosine_place": rank_of(weights.frequency_cosine),
        "mean_activation": activations.mean(0),
        "spread": activations.std(0),
    }
    for name, values in {
        "total": effects.loss.abs(),
        "direct": effects.loss_frozen.abs(),
        "entropy_total": effects.entropy.abs(),
        "entropy_frozen": effects.entropy_frozen.abs(),
        "entropy_shift": effects.entropy,
        "entropy_shift_frozen": effects.entropy_frozen,
        "loss_shift": effects.loss,
        "changed": effects.changed,
        "changed_frozen": effects.changed_frozen,
        "kl_total": effects.kl.abs(),
        "kl_held": effects.kl_held.abs(),
        "kl_shift": effects.kl,
        "loss_held": effects.loss_held.abs(),
    }.items():
        figures |= bootstrap.mean(values).columns(name)
    controls: dict[str, Tensor] = {}
    for name, static, total, closed in (
        ("mediated", "rho", effects.loss, effects.loss_frozen),
        ("entropy_mediated", "rho", effects.entropy, effects.entropy_frozen),
        ("frequency", "frequency_cosine", effects.kl, effects.kl_held),
    ):
        ordinary = figures[f"{static}_place"] >= TOP  # candidates by weights are no controls
        count = max(2, min(CONTROLS, int(ordinary.sum()) // 4))  # fewer if there are few to draw from
        controls[name] = matched_controls(features, ordinary, count, seed)
        share = bootstrap.share(closed.abs(), total.abs())
        figures |= share.columns(f"{name}_share")
        figures |= bootstrap.mean(total.abs() - closed.abs()).columns(f"{name}_effect")
        test = above_controls(share, controls[name])
        figures |= {f"{name}_{column}": values for column, values in test.items()}
    columns = {name: values.tolist() for name, values in figures.items()}
    records = [
        {"layer": layer, "neuron": number} | {name: values[number] for name, values in columns.items()}
        for number in range(len(features))
    ]
    return records, controls


def matching_features(norm: Tensor, activations: Tensor) -> Tensor:
    """Return the features (neurons, 3) that controls are matched in: log length of the output weights, mean
    and log spread of activations."""
    return torch.stack(
        [norm.clamp_min(1e-12).log(), activations.mean(0), activations.std(0).clamp_min(1e-12).log()], 1
    )


def rank_of(static: Tensor) -> Tensor:
    """Return the rank of each neuron in its layer, from 0 for the largest absolute value up to 1.

    >>> rank_of(torch.tensor([0.1, -0.5, 0.2, 0.0]))
    tensor([0.5000, 0.0000, 0.2500, 0.7500])
    """
    return static.abs().argsort(descending=True).argsort() / len(static)
