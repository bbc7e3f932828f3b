"""What noise do irrelevant keys make? A sum that must be 1, and what signed weights are divided by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from unsoft.lab.compare.jobs import Job, Results, Rows
from unsoft.lab.compare.section import EXPERIMENT, SURVEY, Finding, Request, Section, claim, job
from unsoft.lab.evidence import Estimate, grade, paired_ratio, t_interval
from unsoft.lab.report.figure import Figure, by_value
from unsoft.modules.registry import resolve_formula

KEYS = 64
MEANS = (0.0, -2.0, -4.0, -6.0, -8.0)
FORCED, FREE = "softmax", "softmax1"
_MECHANISMS = (FORCED, FREE, "softpick", "cog", "sinh", "sigmoid")
ADVANTAGE = 4.0
SLOPE = 0.1
"""Of LeakyReLU, below 0."""


def _leaky(s: Tensor) -> Tensor:
    return torch.where(s > 0, s, SLOPE * s)


SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ReLU": torch.relu,
    "LeakyReLU": _leaky,
    "identity": lambda s: s,
}
"""Of cosFormer's ablation; the first cannot be negative."""
NORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "the sum": lambda w: w.sum(-1, keepdim=True),
    "the sum of sizes": lambda w: w.abs().sum(-1, keepdim=True),
}


def facts(request: Request) -> list[Job]:
    sizes = {"rows": 4 * request.level.geometries, "draws": request.level.draws}
    return [
        job("forced mass", None, forced_mass, 0.2, **sizes),
        job("signed scores", None, signed_scores, 0.2, **sizes),
    ]


def forced_mass(rows: int, draws: int) -> Rows:
    """Size of the output when nothing is relevant: sqrt(sum a^2) with random values, by the mean of the
    logits.
    """
    found = []
    for draw in range(draws):
        noise = torch.randn(
            rows, KEYS, generator=torch.Generator().manual_seed(500 + draw), dtype=torch.float64
        )
        for name in _MECHANISMS:
            for mean in MEANS:
                size = resolve_formula(name).row(noise + mean).square().sum(-1).mean().sqrt()
                found.append({"mechanism": name, "mean": mean, "draw": draw, "noise": float(size)})
    return found


def signed_scores(rows: int, draws: int) -> Rows:
    """How much of a relevant key's value the output explains, with the best constant factor.

    One key has the logit 4 among 63 N(0, 1); values are random, so the output is a_1 times the value plus
    noise of variance sum a^2 over the others. explained = E[a_1]^2 / (E[a_1^2] + E[noise]).
    """
    found = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(600 + draw)
        logits = torch.randn(rows, KEYS, generator=generator, dtype=torch.float64)
        logits[:, 0] = ADVANTAGE
        for score, of in SCORES.items():
            for norm, by in NORMS.items():
                weights = of(logits) / by(of(logits))
                own, energy = weights[:, 0], weights.square().sum(-1)
                explained = float(own.mean().square() / energy.mean())
                found.append({"score": score, "divided by": norm, "draw": draw, "explained": explained})
    return found


def figures(results: Results) -> Iterator[Figure]:
    rows = results.get("forced mass")
    if rows:
        shown = [
            {"mechanism": name, "mean": mean, "noise": _noise(rows, name, mean).value}
            for name in _MECHANISMS
            for mean in MEANS
        ]
        chart = by_value(
            shown,
            "mean",
            "noise",
            "mechanism",
            x_title="mean logit of a row in which nothing is relevant",
            y_title="size of the output",
        )
        note = f"{KEYS} keys with logits N(mean, 1) and random values of length 1."
        yield Figure("forced-mass", "Noise when nothing is relevant", note, shown, chart)


def _noise(rows: Rows, name: str, mean: float) -> Estimate:
    return t_interval([row["noise"] for row in rows if row["mechanism"] == name and row["mean"] == mean])


@claim(
    SURVEY,
    EXPERIMENT,
    "The forced sum wastes attention on irrelevant keys and injects noise.",
    refuted="The outputs are equally large at every mean down to −8.",
)
def _forced_noise(results: Results) -> Finding:
    """Rows in which nothing is relevant, softmax against softmax1, draw by draw: holds if softmax's
    output is more than twice as large already for logits N(0, 1), by the lower end of the interval; with
    limits if only for logits that are pushed further down.
    """
    rows = results.rows("forced mass")
    ratios = {}
    for mean in MEANS:
        pair = [
            [r["noise"] for r in rows if r["mechanism"] == name and r["mean"] == mean]
            for name in (FORCED, FREE)
        ]
        ratios[mean] = paired_ratio(*pair)
    lows = {mean: ratio.lower for mean, ratio in ratios.items()}
    where = [mean for mean in MEANS if lows[mean] > 2]
    said = ", ".join(f"{ratios[mean].value:.3g} at mean {mean:g}" for mean in MEANS)
    return grade(lows[0.0] > 2, bool(where)), (
        f"noise of softmax over that of softmax1, which differs in the forced sum alone: {said}"
    )


@claim(
    SURVEY,
    EXPERIMENT,
    "Weights should be non-negative: negative ones aggregate what is opposed and hurt"
    " (cosFormer's ablation).",
    refuted="No signed score explains a tenth less under either divisor.",
)
def _non_negativity(results: Results) -> Finding:
    """ReLU against LeakyReLU and identity, each over the sum and over the sum of sizes: holds if both
    signed scores explain a tenth less under both divisors, interval against interval; with limits if some
    of the four pairs do.
    """
    rows = results.rows("signed scores")

    def explained(score: str, norm: str) -> Estimate:
        return t_interval([r["explained"] for r in rows if r["score"] == score and r["divided by"] == norm])

    worse = []
    for norm in NORMS:
        plain = explained("ReLU", norm)
        floor = plain.lower
        for score in ("LeakyReLU", "identity"):
            signed = explained(score, norm)
            worse.append(signed.upper < 0.9 * floor)
    said = "; ".join(
        f"over {norm} " + ", ".join(f"{score} {explained(score, norm).value:.2f}" for score in SCORES)
        for norm in NORMS
    )
    return grade(all(worse), any(worse)), (
        f"share of a relevant key's value that the output explains: {said}; what becomes of it in training"
        f" is the study's"
    )


SECTION = Section(
    name="irrelevance",
    order=38,
    title="Irrelevance",
    question="What noise do irrelevant keys make?",
    facts=facts,
    figures=figures,
    claims=[_forced_noise, _non_negativity],
)
