"""Distinguishing an irrelevant key from an opposed one, against the noise of the other keys.

“Not about this” and “the opposite of this” are different answers. Here the weights of an opposed
and an irrelevant key must differ by more than the noise of the other keys.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Results, RowIterator, Rows, mean_of
from unsoft.lab.compare.section import SIGNED, SURVEY, Finding, Section
from unsoft.lab.evidence import Estimate, grade

KEYS = 64
OPPOSED, WEAKLY = (0.0, -4.0), (-2.0, -8.0)
PAIRS = (OPPOSED, (0.0, -8.0), WEAKLY)
LEVELS = (0.0, -1.0, -2.0, -4.0, -6.0, -8.0)
DETECTED, HINTED = 1.0, 0.36
"""d' = 1 is right in 76 % of choices between two, 0.36 in 60 %."""
_BLOCKS = 8
_COMPARED = ("softmax1", "sinh")
"""Which differ from softmax in the freedom of the sum, and in the sign besides."""


_ASKED = "Does it tell an opposed key from an irrelevant one?"
SECTION = Section(order=32, group=SIGNED, question=_ASKED, about=__doc__)


@SECTION.each(0.3, "softmax", "cog", *_COMPARED, rows=lambda level: max(level.geometries // 2, _BLOCKS))
def opposition(candidate: Candidate, rows: int) -> RowIterator:
    """Measure d' of pairs of logits that one key may have among others N(0, 1), in eight blocks of rows."""
    generator = torch.Generator().manual_seed(22)
    others = torch.randn(rows, KEYS - 1, generator=generator, dtype=torch.float64)
    positions = torch.randint(KEYS, (rows,), generator=generator)[:, None]
    logits = torch.zeros(rows, KEYS, dtype=torch.float64)
    logits.masked_scatter_(torch.arange(KEYS) != positions, others)
    weigh = candidate.row()
    seen: dict[float, tuple[Tensor, Tensor]] = {}
    for at in LEVELS:
        row = weigh(logits.scatter(1, positions, at))
        own = row.gather(1, positions)[:, 0]
        seen[at] = own, row.square().sum(-1) - own.square()
    for (first, second), (block, part) in product(PAIRS, enumerate(torch.arange(rows).chunk(_BLOCKS))):
        d = d_prime(seen[first][0][part], seen[second][0][part], seen[first][1][part])
        yield {"kind": "pair", "first": first, "second": second, "block": block, "d": d}
    neutral, energy = seen[0.0]
    for at in LEVELS:
        yield {"kind": "curve", "logit": at, "d": d_prime(neutral, seen[at][0], energy)}


def d_prime(first: Tensor, second: Tensor, energy: Tensor) -> float:
    """Return how far apart two weights of a key are, in units of the noise from the other keys' weights.

    With random values of variance 1, reading the output along the key's own value gives the key's weight
    plus noise of the variance ``energy``, the sum of the other weights' squares.

    >>> d_prime(torch.tensor([0.5]), torch.tensor([-0.5]), torch.tensor([0.25]))
    2.0
    """
    noise = float(energy.mean().sqrt())
    return float((first - second).abs().mean()) / noise if noise > 0 else 0.0


@SECTION.column(
    "opposed",
    "opposed ≠ irrelevant",
    yes=DETECTED,
    partly=HINTED,
    margin=0.1,
    noise=1e-3,
    unit="d′",
    need="tell opposed from irrelevant keys",
)
def _blocks(results: Results, label: str) -> list[float]:
    """D′: weight at logit 0 minus weight at −4, over the root of the other 63 keys' squared weights.

    Yes from d′ = 1, the usual threshold of detection (76 % right in a choice between two); partly from 0.36
    (60 %). Chance is 0, which an output of zeros, random weights and everything that is 0 below logit 0 get.
    """
    rows = results.get("opposition", label, kind="pair", first=OPPOSED[0], second=OPPOSED[1])
    return [row["d"] for row in rows]


@SECTION.lines(
    "opposition",
    "Opposed against irrelevant",
    x=("below", "how far the logit of the opposed key lies below 0"),
    y=("d", "d′ against logit 0"),
    dots=[],
    spread=True,
)
def _curves(results: Results) -> Rows:
    """The weight of an irrelevant key (logit 0) minus that of an opposed one, over the noise of 63 other
    keys. 1: right in 76 % of choices between two.
    """
    rows = results.each("opposition", kind="curve")
    return [row | {"below": -row["logit"]} for row in rows if row["logit"] < 0]


def distance(results: Results, label: str, pair: tuple[float, float] = OPPOSED) -> Estimate:
    """Return d' between a pair of logits."""
    rows = results.rows("opposition", label, kind="pair")
    return mean_of(rows, "d", first=pair[0], second=pair[1])


@SECTION.experiment(
    SURVEY,
    "Softmax erases differences among negative logits: weakly and strongly opposed keys look the same.",
)
def _erased_differences(results: Results) -> Finding:
    """d′ between logits −2 and −8, interval over eight blocks of rows: supported if softmax's stays below
    0.36 (60 % right) while cog's exceeds 1; partly if cog's does not.

    Refuted: softmax's d′ reaches 0.36.
    """
    softmax, cog = (distance(results, name, WEAKLY) for name in ("softmax", "cog"))
    erased = softmax.upper < HINTED
    return grade(erased and cog.lower > DETECTED, erased), (
        f"d′ between logits {WEAKLY[0]:g} and {WEAKLY[1]:g}: softmax {softmax}, cog {cog}"
    )


@SECTION.experiment(
    SURVEY, "Weights that are influence factors instead of probabilities tell keys apart better."
)
def _influence_factors(results: Results) -> Finding:
    """d′ of 0 against −4 for formulas that differ in one thing: supported if a free sum alone (softmax1)
    and a free sum with signs (sinh) both exceed softmax by a tenth, interval against interval; partly if
    one does.

    Refuted: Neither formula tells keys apart better than softmax.
    """
    softmax, softmax1, sinh = (distance(results, name) for name in ("softmax", *_COMPARED))
    free, signed = (one.lower > 1.1 * softmax.upper for one in (softmax1, sinh))
    return grade(free and signed, free or signed), (
        f"d′ of 0 against −4: softmax {softmax}; with a free sum (softmax1) {softmax1};"
        f" with a free sum and signs (sinh) {sinh}"
    )
