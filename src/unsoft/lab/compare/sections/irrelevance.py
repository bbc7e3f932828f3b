"""Noise of irrelevant keys: a sum that must be 1, and the normaliser of signed weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import Candidate, normals
from unsoft.lab.compare.jobs import Results, RowIterator, Rows, mean_of, ratio_of
from unsoft.lab.compare.section import SIGNED, SURVEY, Finding, Section
from unsoft.lab.evidence import grade
from unsoft.modules.registry import resolve_formula

KEYS = 64
MEANS = (0.0, -2.0, -4.0, -6.0, -8.0)
FORCED, FREE = "softmax", "softmax1"
ADVANTAGE = 4.0
_FLOOR = 1e-4
SLOPE = 0.1
"""Slope of LeakyReLU below 0."""


SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ReLU": torch.relu,
    "LeakyReLU": lambda s: torch.where(s > 0, s, SLOPE * s),
    "identity": lambda s: s,
}
"""Scores of cosFormer's ablation; the first cannot be negative."""
NORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "the sum": lambda w: w.sum(-1, keepdim=True),
    "the sum of sizes": lambda w: w.abs().sum(-1, keepdim=True),
}


SECTION = Section(order=38, group=SIGNED, question="What noise do irrelevant keys make?")


@SECTION.each(0.1, name="irrelevant keys")
def irrelevant(candidate: Candidate, rows: int = 64) -> RowIterator:
    """Measure the size sqrt(sum a^2) of the output if nothing is relevant, by the mean of the logits."""
    noise, weigh = normals(500)(rows, KEYS), candidate.row()
    for mean in MEANS:
        yield {"mean": mean, "noise": float(weigh(noise + mean).square().sum(-1).mean().sqrt())}


@SECTION.fact(0.2, rows=lambda level: 4 * level.geometries)
def forced_mass(rows: int, draws: int) -> RowIterator:
    """Measure the same size for several draws under the two mechanisms that differ in the forced sum."""
    for draw in range(draws):
        noise = normals(500 + draw)(rows, KEYS)
        for name, mean in itertools.product((FORCED, FREE), MEANS):
            size = resolve_formula(name).row(noise + mean).square().sum(-1).mean().sqrt()
            yield {"mechanism": name, "mean": mean, "draw": draw, "noise": float(size)}


@SECTION.fact(0.2, rows=lambda level: 4 * level.geometries)
def signed_scores(rows: int, draws: int) -> RowIterator:
    """Measure how much of a relevant key's value the output explains, with the best constant factor.

    One key has the logit 4 among 63 N(0, 1); values are random, so the output is a_1 times the value plus
    noise of variance sum a^2 over the others. explained = E[a_1]^2 / (E[a_1^2] + E[noise]).
    """
    for draw in range(draws):
        logits = normals(600 + draw)(rows, KEYS)
        logits[:, 0] = ADVANTAGE
        for (score, function), (norm, divisor) in itertools.product(SCORES.items(), NORMS.items()):
            weights = function(logits) / divisor(function(logits))
            explained = float(weights[:, 0].mean().square() / weights.square().sum(-1).mean())
            yield {"score": score, "divided by": norm, "draw": draw, "explained": explained}


@SECTION.lines(
    "forced-mass",
    "Noise when nothing is relevant",
    x=("below", "how far the mean logit lies below 0"),
    y=("noise", "size of the output"),
    log_y=True,
)
def _above_floor(results: Results) -> Rows:
    """64 keys with logits N(mean, 1) and random values of length 1; lower is better.

    A line ends where the output is below 0.0001.
    """
    rows = results.each("irrelevant keys")
    return [row | {"below": -row["mean"]} for row in rows if row["noise"] > _FLOOR]


@SECTION.experiment(SURVEY, "The forced sum wastes attention on irrelevant keys and injects noise.")
def _forced_noise(results: Results) -> Finding:
    """Rows in which nothing is relevant, softmax against softmax1, draw by draw: supported if softmax's
    output is more than twice as large already for logits N(0, 1), by the lower end of the interval;
    partly if only for logits that are pushed further down.

    Refuted: The outputs are equally large at every mean down to −8.
    """
    rows = results.rows("forced mass")
    ratios = {mean: ratio_of(rows, "noise", FORCED, FREE, mean=mean) for mean in MEANS}
    twice = {mean: ratio.lower > 2 for mean, ratio in ratios.items()}
    means = ", ".join(f"{ratio.value:.3g} at mean {mean:g}" for mean, ratio in ratios.items())
    return grade(twice[0.0], any(twice.values())), (
        f"noise of softmax over that of softmax1, which differs in the forced sum alone: {means}"
    )


@SECTION.experiment(
    SURVEY,
    "Weights should be non-negative: negative ones aggregate what is opposed and hurt (cosFormer's"
    " ablation).",
)
def _non_negativity(results: Results) -> Finding:
    """ReLU against LeakyReLU and identity, each over the sum and over the sum of sizes: supported if both
    signed scores explain a tenth less under both divisors, interval against interval; partly if some of
    the four pairs do.

    Refuted: No signed score explains a tenth less under either divisor.
    """
    rows = results.rows("signed scores")
    explained = {
        (score, norm): mean_of(rows, "explained", **{"score": score, "divided by": norm})
        for score, norm in itertools.product(SCORES, NORMS)
    }
    worse = [
        explained[score, norm].upper < 0.9 * explained["ReLU", norm].lower
        for score, norm in itertools.product(("LeakyReLU", "identity"), NORMS)
    ]
    shares = "; ".join(
        f"over {norm} " + ", ".join(f"{score} {explained[score, norm].value:.2f}" for score in SCORES)
        for norm in NORMS
    )
    return grade(all(worse), any(worse)), (
        f"share of a relevant key's value that the output explains: {shares}; what becomes of it in training"
        f" is the study's"
    )
