"""Distinguishing an irrelevant key from an opposed one, against the noise of the other keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Job, Results, Rows, matching, mean_of
from unsoft.lab.compare.section import (
    EXPERIMENT,
    SIGNED,
    SURVEY,
    Finding,
    Request,
    ScoreColumn,
    Section,
    claim,
    job,
)
from unsoft.lab.evidence import Estimate, grade
from unsoft.lab.report.figure import Figure, by_mechanism

KEYS = 64
OPPOSED, WEAKLY = (0.0, -4.0), (-2.0, -8.0)
PAIRS = (OPPOSED, (0.0, -8.0), WEAKLY)
LEVELS = (0.0, -1.0, -2.0, -4.0, -6.0, -8.0)
DETECTED, HINTED = 1.0, 0.36
"""d' = 1 is right in 76 % of choices between two, 0.36 in 60 %."""
_BLOCKS = 8
_COMPARED = ("softmax1", "sinh")
"""Which differ from softmax in the freedom of the sum, and in the sign besides."""


def jobs(request: Request) -> list[Job]:
    rows = max(request.level.geometries // 2, _BLOCKS)
    candidates = request.with_references("softmax", "cog", *_COMPARED)
    return [job("opposition", c, opposition, 0.3, rows=rows) for c in candidates]


def opposition(candidate: Candidate, rows: int) -> Rows:
    """Measure d' of pairs of logits that one key may have among others N(0, 1), in eight blocks of rows."""
    generator = torch.Generator().manual_seed(22)
    others = torch.randn(rows, KEYS - 1, generator=generator, dtype=torch.float64)
    positions = torch.randint(KEYS, (rows,), generator=generator)[:, None]
    logits = torch.zeros(rows, KEYS, dtype=torch.float64)
    logits.masked_scatter_(torch.arange(KEYS) != positions, others)
    weigh = candidate.row()
    seen: dict[float, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for at in LEVELS:
            row = weigh(logits.scatter(1, positions, at))
            own = row.gather(1, positions)[:, 0]
            seen[at] = own, row.square().sum(-1) - own.square()
    blocks = list(enumerate(torch.arange(rows).chunk(_BLOCKS)))
    pairs: Rows = [
        {"kind": "pair", "first": first, "second": second, "block": block}
        | {"d": d_prime(seen[first][0][part], seen[second][0][part], seen[first][1][part])}
        for first, second in PAIRS
        for block, part in blocks
    ]
    neutral, energy = seen[0.0]
    return pairs + [
        {"kind": "curve", "logit": at, "d": d_prime(neutral, seen[at][0], energy)} for at in LEVELS
    ]


def d_prime(first: Tensor, second: Tensor, energy: Tensor) -> float:
    """Return how far apart two weights of a key are, in units of the noise from the other keys' weights.

    With random values of variance 1, reading the output along the key's own value gives the key's weight
    plus noise of the variance ``energy``, the sum of the other weights' squares.

    >>> d_prime(torch.tensor([0.5]), torch.tensor([-0.5]), torch.tensor([0.25]))
    2.0
    """
    noise = float(energy.mean().sqrt())
    return float((first - second).abs().mean()) / noise if noise > 0 else 0.0


def blocks_of(results: Results, label: str, pair: tuple[float, float] = OPPOSED) -> list[float | None]:
    """Return d' between a pair of logits in each block of rows."""
    rows = matching(results.get("opposition", label, kind="pair"), first=pair[0], second=pair[1])
    return [row["d"] for row in rows]


def distance(results: Results, label: str, pair: tuple[float, float] = OPPOSED) -> Estimate | None:
    """Return d' between a pair of logits, or None if it was not measured."""
    rows = matching(results.get("opposition", label, kind="pair"), first=pair[0], second=pair[1])
    return mean_of(rows, "d") if rows else None


def figures(results: Results) -> Iterator[Figure]:
    every = results.each("opposition", kind="curve")
    rows = [row | {"below": -row["logit"]} for row in every if row["logit"] < 0]
    if rows:
        chart = by_mechanism(
            results.labels,
            rows,
            "below",
            "d",
            x_title="how far the logit of the opposed key lies below 0",
            y_title="d′ against logit 0",
            dots=[],
            spread=True,
        )
        note = (
            "The weight of an irrelevant key (logit 0) minus that of an opposed one, over the noise of"
            f" {KEYS - 1} other keys. 1: right in 76 % of choices between two."
        )
        yield Figure("opposition", "Opposed against irrelevant", note, rows, chart)


def _needed(results: Results, label: str, pair: tuple[float, float]) -> Estimate:
    rows = results.rows("opposition", label, kind="pair")
    return mean_of(rows, "d", first=pair[0], second=pair[1])


@claim(
    SURVEY,
    EXPERIMENT,
    "Softmax erases differences among negative logits: weakly and strongly opposed keys look the same.",
)
def _erased_differences(results: Results) -> Finding:
    """d′ between logits −2 and −8, interval over eight blocks of rows: supported if softmax's stays below
    0.36 (60 % right) while cog's exceeds 1; partly if cog's does not.

    Refuted: softmax's d′ reaches 0.36.
    """
    softmax, cog = (_needed(results, name, WEAKLY) for name in ("softmax", "cog"))
    erased = softmax.upper < HINTED
    return grade(erased and cog.lower > DETECTED, erased), (
        f"d′ between logits {WEAKLY[0]:g} and {WEAKLY[1]:g}: softmax {softmax}, cog {cog}"
    )


@claim(
    SURVEY, EXPERIMENT, "Weights that are influence factors instead of probabilities tell keys apart better."
)
def _influence_factors(results: Results) -> Finding:
    """d′ of 0 against −4 for formulas that differ in one thing: supported if a free sum alone (softmax1)
    and a free sum with signs (sinh) both exceed softmax by a tenth, interval against interval; partly if
    one does.

    Refuted: Neither formula tells keys apart better than softmax.
    """
    softmax, softmax1, sinh = (_needed(results, name, OPPOSED) for name in ("softmax", *_COMPARED))
    free, signed = (one.lower > 1.1 * softmax.upper for one in (softmax1, sinh))
    return grade(free and signed, free or signed), (
        f"d′ of 0 against −4: softmax {softmax}; with a free sum (softmax1) {softmax1};"
        f" with a free sum and signs (sinh) {sinh}"
    )


SECTION = Section(
    name="opposition",
    order=32,
    group=SIGNED,
    title="Opposition",
    question="Does it tell an opposed key from an irrelevant one?",
    about=(
        "“Not about this” and “the opposite of this” are different answers. What counts is whether their"
        " weights differ by more than the other keys' weights make noise."
    ),
    jobs=jobs,
    figures=figures,
    columns=[
        ScoreColumn(
            "opposed",
            "opposed ≠ irrelevant",
            "d′: weight at logit 0 minus weight at −4, over the root of the other 63 keys' squared weights",
            distance,
            DETECTED,
            HINTED,
            unit="d′",
            why=(
                "yes from d′ = 1, the usual threshold of detection (76 % right in a choice between two);"
                " partly from 0.36 (60 %); chance is 0, where an output of zeros, random weights and"
                " everything that is 0 below logit 0 stand."
            ),
            noise=1e-3,
            need="tell opposed from irrelevant keys",
            draws=blocks_of,
            margin=0.1,
        )
    ],
    claims=[_erased_differences, _influence_factors],
)
