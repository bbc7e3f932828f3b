"""Claims about single mechanisms: random features of softmax, log-n scaling, cosFormer's locality."""

from __future__ import annotations

import itertools
import math

import torch

from unsoft import measure
from unsoft.lab.compare.candidate import Candidate, normals
from unsoft.lab.compare.jobs import Results, RowIterator, mean_of
from unsoft.lab.compare.section import SU, SURVEY, Finding, Section
from unsoft.lab.evidence import grade

FEATURES, SIZES = (16, 64, 256, 1024), (0.25, 1.0)
DEGREES = (2, 4, 8, 16, 30)
LENGTHS = (64, 256, 1024, 4096)


SECTION = Section(order=74)


@SECTION.fact(0.5)
def random_features(draws: int) -> RowIterator:
    """Measure the error of performer's weights against softmax's by the number of its random features.

    Queries and keys have the size 1/4, where the error is that of averaging, and 1, where single features
    dominate and more of them hardly help.
    """
    for count, size, draw in itertools.product(FEATURES, SIZES, range(draws)):
        query, key = size * normals(1300 + draw, torch.float32)(2, 1, 64, 16)
        weights = Candidate("performer", f"performer({count})").weights(query, key)
        exact = torch.softmax(query @ key.mT / 4, -1)
        error = float((weights - exact).norm() / exact.norm())
        yield {"features": count, "size": size, "draw": draw, "error": error}


@SECTION.fact(0.1, name="Taylor features")
def taylor_features() -> RowIterator:
    """Measure the error of linear attention with Taylor features of exp against softmax, by their degree.

    The features of degree m are all products of m coordinates over sqrt(m!), so their inner product is
    (q . k)^m / m! and needs not be formed feature by feature.
    """
    query, key = normals(1300)(2, 64, 16)
    logits = query @ key.mT / 4
    exact = torch.softmax(logits, -1)
    term = total = torch.ones_like(logits)
    for degree in range(1, DEGREES[-1] + 1):
        term = term * logits / degree
        total = total + term
        if degree in DEGREES:
            error = float((total / total.sum(-1, keepdim=True) - exact).norm() / exact.norm())
            # Distinct products of at most this many of the 16 coordinates.
            yield {"degree": degree, "features": math.comb(16 + degree, 16), "error": error}


@SECTION.fact(0.3, name="entropy by length")
def entropies(draws: int) -> RowIterator:
    """Measure the entropy of a row by its length, with and without the scale log n / log 512."""
    for length, draw in itertools.product(LENGTHS, range(draws)):
        normal = normals(1400 + draw, torch.float32)
        query, key = normal(1, 1, 64), 3 * normal(1, length, 64)
        for name in ("softmax", "logn+softmax"):
            entropy = float(measure.entropy(Candidate(name, name).weights(query, key)))
            yield {"mechanism": name, "length": length, "draw": draw, "entropy": entropy}


@SECTION.fact(0.2)
def locality(draws: int) -> RowIterator:
    """Measure the mean distance of a query to the keys it attends to, with cosFormer's cosine and without."""
    tokens = 128
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs().double()
    for draw in range(draws):
        query, key = normals(1500 + draw)(2, 1, tokens, 64)
        for name in ("linear-relu", "cosformer"):
            mean = float((Candidate(name, name).weights(query, key)[0] * distance).sum(-1).mean())
            yield {"mechanism": name, "draw": draw, "distance": mean}


@SECTION.theorem(SU, "Softmax is linear attention with infinitely many features.")
def _performer_limit(results: Results) -> Finding:
    """Linear attention with Taylor features of exp: supported if its error against softmax falls with every
    degree and below 1e-12 at degree 30; partly if it only falls. How fast the error of random features
    falls is reported, not judged.
    """
    series = results.rows("Taylor features")
    falls = all(a["error"] > b["error"] for a, b in itertools.pairwise(series))
    rows, powers = results.rows("random features"), []
    for size in SIZES:
        errors = [mean_of(rows, "error", features=n, size=size).value for n in FEATURES]
        powers.append(math.log(errors[-1] / errors[0]) / math.log(FEATURES[-1] / FEATURES[0]))
    return grade(falls and series[-1]["error"] < 1e-12, falls), (
        "error of Taylor features: "
        + ", ".join(f"{row['error']:.1e} at degree {row['degree']}" for row in series)
        + f"; that of random features falls like features^{powers[0]:.2f} for queries and keys of size"
        f" {SIZES[0]:g} and like features^{powers[1]:.2f} for size {SIZES[1]:g}, where {FEATURES[-1]} are too"
        " few"
    )


@SECTION.experiment(SU, "The scale log n keeps the entropy of attention from growing with length.")
def _entropy_invariance(results: Results) -> Finding:
    """Random rows of 64 to 4096 keys: supported if the entropy rises by less than a tenth of what an even
    row gains; partly if by less than 80 % of what it does without the scale.

    Refuted: It rises by 80 % of softmax's rise or more.
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


@SECTION.experiment(SURVEY, "cosFormer's cosine re-weighting makes attention local.")
def _cosformer_local(results: Results) -> Finding:
    """Random tokens, cosformer made for their number against linear attention with relu: supported if the
    mean distance is a fifth smaller, interval against interval; partly if smaller at all.

    Refuted: The mean distance is not smaller.
    """
    rows = results.rows("locality")
    plain, local = (mean_of(rows, "distance", mechanism=name) for name in ("linear-relu", "cosformer"))
    return grade(local.upper < 0.8 * plain.lower, local.upper < plain.lower), (
        f"mean distance to the keys that a query of 128 tokens looks at: {plain} with relu alone, {local}"
        f" with the cosine"
    )
