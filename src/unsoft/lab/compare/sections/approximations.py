"""Claims about single mechanisms: random features of softmax, log-n scaling, cosFormer's locality."""

from __future__ import annotations

import math
from typing import Any

import torch

from unsoft import measure
from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Job, Results
from unsoft.lab.compare.section import (
    EXPERIMENT,
    SU,
    SURVEY,
    THEOREM,
    Claim,
    ComparisonLevel,
    Finding,
    Section,
    job,
)
from unsoft.lab.evidence import Estimate, grade, t_interval

FEATURES = (16, 64, 256, 1024)
LENGTHS = (64, 256, 1024, 4096)


def facts(level: ComparisonLevel) -> list[Job]:
    draws = level.draws
    return [
        job("random features", None, random_features, 0.5, draws=draws),
        job("entropy by length", None, entropies, 0.3, draws=draws),
        job("locality", None, locality, 0.2, draws=draws),
    ]


def random_features(draws: int) -> list[dict[str, Any]]:
    """Error of performer's weights against softmax's, by the number of its random features."""
    rows = []
    for count in FEATURES:
        for draw in range(draws):
            generator = torch.Generator().manual_seed(1300 + draw)
            query, key = (torch.randn(1, 64, 16, generator=generator) for _ in range(2))
            with torch.no_grad():
                found = Candidate("performer", f"performer({count})").weights(query, key)
            exact = torch.softmax(query @ key.mT / 4, -1)
            rows.append(
                {"features": count, "draw": draw, "error": float((found - exact).norm() / exact.norm())}
            )
    return rows


def entropies(draws: int) -> list[dict[str, Any]]:
    """Entropy of a row by its length, with and without the scale log n / log 512."""
    rows = []
    for length in LENGTHS:
        for draw in range(draws):
            generator = torch.Generator().manual_seed(1400 + draw)
            query = torch.randn(1, 1, 64, generator=generator)
            key = 3 * torch.randn(1, length, 64, generator=generator)
            for name in ("softmax", "logn+softmax"):
                with torch.no_grad():
                    row = Candidate(name, name).weights(query, key)
                rows.append(
                    {
                        "mechanism": name,
                        "length": length,
                        "draw": draw,
                        "entropy": float(measure.entropy(row)),
                    }
                )
    return rows


def locality(draws: int) -> list[dict[str, Any]]:
    """Mean distance of a query to the keys it looks at, with cosFormer's re-weighting and without."""
    rows = []
    tokens = 128
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs().double()
    for draw in range(draws):
        generator = torch.Generator().manual_seed(1500 + draw)
        query, key = (torch.randn(1, tokens, 64, generator=generator, dtype=torch.float64) for _ in range(2))
        for name in ("linear-relu", "cosformer"):
            with torch.no_grad():
                weights = Candidate(name, name).weights(query, key)[0]
            rows.append(
                {"mechanism": name, "draw": draw, "distance": float((weights * distance).sum(-1).mean())}
            )
    return rows


def _performer(results: Results) -> Finding:
    rows = results.rows("random features")
    found = {count: t_interval([r["error"] for r in rows if r["features"] == count]) for count in FEATURES}
    first, last = FEATURES[0], FEATURES[-1]
    power = math.log(found[last].value / found[first].value) / math.log(last / first)
    return grade(-0.6 < power < -0.4, power < -0.1), (
        f"error against softmax falls like features^{power:.2f}: "
        + ", ".join(f"{one.value:.2f} with {count}" for count, one in found.items())
    )


def _entropy(results: Results) -> Finding:
    rows = results.rows("entropy by length")

    def at(name: str, length: int) -> Estimate:
        return t_interval([r["entropy"] for r in rows if r["mechanism"] == name and r["length"] == length])

    rise = {
        name: at(name, LENGTHS[-1]).value - at(name, LENGTHS[0]).value for name in ("softmax", "logn+softmax")
    }
    most = math.log(LENGTHS[-1] / LENGTHS[0])
    return grade(abs(rise["logn+softmax"]) < 0.1 * most, rise["logn+softmax"] < 0.8 * rise["softmax"]), (
        f"entropy from {LENGTHS[0]} to {LENGTHS[-1]} keys: softmax {at('softmax', LENGTHS[0])} →"
        f" {at('softmax', LENGTHS[-1])} nats, scaled by log n"
        f" {at('logn+softmax', LENGTHS[0])} → {at('logn+softmax', LENGTHS[-1])}; an even row gains {most:.2f}"
    )


def _local(results: Results) -> Finding:
    rows = results.rows("locality")
    plain, local = (
        t_interval([r["distance"] for r in rows if r["mechanism"] == name])
        for name in ("linear-relu", "cosformer")
    )
    low = plain.lower
    high = local.upper
    return grade(high < 0.8 * low, high < low), (
        f"mean distance to the keys that a query of 128 tokens looks at: {plain} with relu alone, {local}"
        f" with the cosine"
    )


SECTION = Section(
    name="approximations",
    order=74,
    facts=facts,
    claims=[
        Claim(
            "performer-limit",
            SU,
            "Softmax is linear attention with infinitely many features.",
            THEOREM,
            "Performer's error against softmax falls like features^−½, exponent between −0.6 and −0.4 from"
            " 16 to 1024; with limits if it falls at all.",
            check=_performer,
        ),
        Claim(
            "entropy-invariance",
            SU,
            "The scale log n keeps the entropy of attention from growing with length.",
            EXPERIMENT,
            "Random rows of 64 to 4096 keys: holds if the entropy rises by less than a tenth of what an even"
            " row gains; with limits if by less than 80 % of what it does without the scale.",
            "It rises by 80 % of softmax's rise or more.",
            _entropy,
        ),
        Claim(
            "cosformer-local",
            SURVEY,
            "cosFormer's cosine re-weighting makes attention local.",
            EXPERIMENT,
            "Random tokens, cosformer made for their number against linear attention with relu: holds if the"
            " mean distance is a fifth smaller, interval against interval; with limits if smaller at all.",
            "The mean distance is not smaller.",
            _local,
        ),
    ],
)
