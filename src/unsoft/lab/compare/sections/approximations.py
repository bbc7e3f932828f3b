"""Claims about single mechanisms: random features of softmax, log-n scaling, cosFormer's locality."""

from __future__ import annotations

import itertools
import math

import torch

from unsoft import measure
from unsoft.lab.compare.candidate import Candidate, normals
from unsoft.lab.compare.jobs import Job, Results, Rows, mean_of
from unsoft.lab.compare.section import EXPERIMENT, SU, SURVEY, THEOREM, Finding, Request, Section, claim, job
from unsoft.lab.evidence import grade

FEATURES = (16, 64, 256, 1024)
LENGTHS = (64, 256, 1024, 4096)


def facts(request: Request) -> list[Job]:
    draws = request.level.draws
    return [
        job("random features", None, random_features, 0.5, draws=draws),
        job("entropy by length", None, entropies, 0.3, draws=draws),
        job("locality", None, locality, 0.2, draws=draws),
    ]


def random_features(draws: int) -> Rows:
    """Measure the error of performer's weights against softmax's by the number of its random features."""
    rows = []
    for count, draw in itertools.product(FEATURES, range(draws)):
        query, key = normals(1300 + draw, torch.float32)(2, 1, 64, 16)
        with torch.no_grad():
            weights = Candidate("performer", f"performer({count})").weights(query, key)
        exact = torch.softmax(query @ key.mT / 4, -1)
        error = float((weights - exact).norm() / exact.norm())
        rows.append({"features": count, "draw": draw, "error": error})
    return rows


def entropies(draws: int) -> Rows:
    """Measure the entropy of a row by its length, with and without the scale log n / log 512."""
    rows = []
    for length, draw in itertools.product(LENGTHS, range(draws)):
        normal = normals(1400 + draw, torch.float32)
        query, key = normal(1, 1, 64), 3 * normal(1, length, 64)
        for name in ("softmax", "logn+softmax"):
            with torch.no_grad():
                entropy = float(measure.entropy(Candidate(name, name).weights(query, key)))
            rows.append({"mechanism": name, "length": length, "draw": draw, "entropy": entropy})
    return rows


def locality(draws: int) -> Rows:
    """Measure the mean distance of a query to the keys it attends to, with cosFormer's cosine and without."""
    rows, tokens = [], 128
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs().double()
    for draw in range(draws):
        query, key = normals(1500 + draw)(2, 1, tokens, 64)
        for name in ("linear-relu", "cosformer"):
            with torch.no_grad():
                mean = float((Candidate(name, name).weights(query, key)[0] * distance).sum(-1).mean())
            rows.append({"mechanism": name, "draw": draw, "distance": mean})
    return rows


@claim(SU, THEOREM, "Softmax is linear attention with infinitely many features.")
def _performer_limit(results: Results) -> Finding:
    """Performer's error against softmax falls like features^−½, exponent between −0.6 and −0.4 from 16 to
    1024; partly if it falls at all.
    """
    rows = results.rows("random features")
    errors = {count: mean_of(rows, "error", features=count) for count in FEATURES}
    first, last = FEATURES[0], FEATURES[-1]
    power = math.log(errors[last].value / errors[first].value) / math.log(last / first)
    return grade(-0.6 < power < -0.4, power < -0.1), (
        f"error against softmax falls like features^{power:.2f}: "
        + ", ".join(f"{one.value:.2f} with {count}" for count, one in errors.items())
    )


@claim(
    SU,
    EXPERIMENT,
    "The scale log n keeps the entropy of attention from growing with length.",
    refuted="It rises by 80 % of softmax's rise or more.",
)
def _entropy_invariance(results: Results) -> Finding:
    """Random rows of 64 to 4096 keys: supported if the entropy rises by less than a tenth of what an even row
    gains; partly if by less than 80 % of what it does without the scale.
    """
    rows, first, last = results.rows("entropy by length"), LENGTHS[0], LENGTHS[-1]
    plain, scaled = (
        [mean_of(rows, "entropy", mechanism=name, length=length) for length in (first, last)]
        for name in ("softmax", "logn+softmax")
    )
    rise, without = scaled[1].value - scaled[0].value, plain[1].value - plain[0].value
    most = math.log(last / first)
    return grade(abs(rise) < 0.1 * most, rise < 0.8 * without), (
        f"entropy from {first} to {last} keys: softmax {plain[0]} → {plain[1]} nats, scaled by log n"
        f" {scaled[0]} → {scaled[1]}; an even row gains {most:.2f}"
    )


@claim(
    SURVEY,
    EXPERIMENT,
    "cosFormer's cosine re-weighting makes attention local.",
    refuted="The mean distance is not smaller.",
)
def _cosformer_local(results: Results) -> Finding:
    """Random tokens, cosformer made for their number against linear attention with relu: supported if the
    mean distance is a fifth smaller, interval against interval; partly if smaller at all.
    """
    rows = results.rows("locality")
    plain, local = (mean_of(rows, "distance", mechanism=name) for name in ("linear-relu", "cosformer"))
    return grade(local.upper < 0.8 * plain.lower, local.upper < plain.lower), (
        f"mean distance to the keys that a query of 128 tokens looks at: {plain} with relu alone, {local}"
        f" with the cosine"
    )


SECTION = Section(
    name="approximations",
    order=74,
    facts=facts,
    claims=[_performer_limit, _entropy_invariance, _cosformer_local],
)
