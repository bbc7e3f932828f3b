"""What can the best query do? S where the query is chosen for it: linear attention, dimensions, a bias of
keys, columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft import measure
from unsoft.lab.compare.jobs import Job, Results, Rows
from unsoft.lab.compare.section import EXPERIMENT, SU, Finding, Request, Section, claim, job
from unsoft.lab.evidence import Estimate, grade, t_interval

KEYS, STEPS, STARTS = 256, 80, 2
WIDTHS = (4, 16, 64)
SPREADS = (0.5, 1.0, 2.0, 4.0)


def _softmax(query: Tensor, key: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT, -1)


def _linear(query: Tensor, key: Tensor, feature: Callable[[Tensor], Tensor]) -> Tensor:
    weights = feature(query) @ feature(key).mT
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)


def _elu1(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {"linear-relu": torch.relu, "linear-elu1": _elu1}
MECHANISMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": _softmax,
    **{name: partial(_linear, feature=feature) for name, feature in FEATURES.items()},
}
"""Written out, so that queries of any length can be searched."""


def facts(request: Request) -> list[Job]:
    draws = request.level.draws
    return [
        job("best queries", None, best_queries, 3.0, draws=draws),
        job("bias of keys", None, key_bias, 0.5, draws=draws),
        job("columns", None, columns, 0.2, draws=4 * draws),
    ]


def best_queries(draws: int) -> Rows:
    """The lowest S of a row over 256 standard normal keys that gradient descent on the query finds, |q|
    free up to 16.
    """
    rows = []
    for width in WIDTHS:
        for name, weigh in MECHANISMS.items():
            generator = torch.Generator().manual_seed(800 + width)
            keys = torch.randn(draws, KEYS, width, generator=generator)
            query = torch.randn(draws, STARTS, width, generator=generator).requires_grad_()
            optimiser = torch.optim.Adam([query], lr=0.1)
            for _ in range(STEPS):
                optimiser.zero_grad()
                measure.sparsity(weigh(query, keys)).sum().backward()
                optimiser.step()
                with torch.no_grad():
                    query *= (16 / query.norm(dim=-1, keepdim=True)).clamp(max=1)
            with torch.no_grad():
                lowest = measure.sparsity(weigh(query, keys)).amin(-1)
                if name in FEATURES:  # a query that asks for one feature alone, which descent may miss
                    alone = measure.sparsity(FEATURES[name](keys).mT).amin(-1)
                    lowest = torch.minimum(lowest, alone)
            rows += [
                {"mechanism": name, "width": width, "draw": k, "S": float(x)} for k, x in enumerate(lowest)
            ]
    return rows


def key_bias(draws: int) -> Rows:
    """Mean S of relu² over 64 queries, with and without a bias of keys; queries with a common part or
    without one.

    The bias points against the mean of the queries, and has the best of some lengths.
    """
    rows = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(900 + draw)
        keys, queries = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (1024, 64))
        for common in (0.0, 1.0):
            asked = (queries + common * torch.ones(16, dtype=torch.float64)) / 4
            bias = -asked.mean(0) / asked.mean(0).norm()
            for length in (0.0, 1.0, 2.0, 4.0, 8.0):
                weights = (asked @ (keys + length * bias).mT).relu().square()
                seen = weights[weights.sum(-1) > 0]
                found = float(measure.sparsity(seen).mean()) if len(seen) else 1.0
                lost = 1 - len(seen) / len(weights)
                rows.append({"common": common, "length": length, "draw": draw, "S": found, "empty": lost})
    return rows


def columns(draws: int) -> Rows:
    """Linear attention with sparse non-negative features: S, and how often two queries have the same
    heaviest key.
    """
    rows = []
    for spread in SPREADS:
        for draw in range(draws):
            generator = torch.Generator().manual_seed(1000 + draw)
            key = (spread * torch.randn(KEYS, 16, generator=generator, dtype=torch.float64)).exp()
            query = torch.rand(64, 16, generator=generator, dtype=torch.float64)
            weights = query @ key.mT
            rows.append(_agreement("linear", spread, draw, weights))
            logits = (
                spread
                * torch.randn(64, 16, generator=generator, dtype=torch.float64)
                @ key.log().mT
                / 4
                / spread
            )
            rows.append(_agreement("softmax", spread, draw, torch.softmax(logits * spread, -1)))
    return rows


def _agreement(name: str, spread: float, draw: int, weights: Tensor) -> dict[str, Any]:
    heaviest = weights.argmax(-1)
    same = (heaviest[:, None] == heaviest).double()
    pairs = (same.sum() - len(same)) / (len(same) * (len(same) - 1))
    return {
        "mechanism": name,
        "spread": spread,
        "draw": draw,
        "S": float(measure.sparsity(weights).mean()),
        "same": float(pairs),
    }


def _lowest(results: Results, name: str, width: int) -> Estimate:
    rows = results.rows("best queries")
    return t_interval([r["S"] for r in rows if r["mechanism"] == name and r["width"] == width])


@claim(
    SU,
    EXPERIMENT,
    "Linear attention is harder to focus than softmax.",
    refuted="With the best query linear attention comes within twice softmax's S.",
    rule=(
        f"The query is chosen by gradient descent for the lowest S over {KEYS} keys, interval over draws:"
        f" holds if linear attention with relu and"
        " with elu + 1 both stay above twice softmax's S; with limits if one does."
    ),
)
def _linear_flat(results: Results) -> Finding:
    width = WIDTHS[-1]
    found = {name: _lowest(results, name, width) for name in MECHANISMS}
    lows = [one.lower for name, one in found.items() if name != "softmax"]
    high = found["softmax"].upper
    held = [low > 2 * high for low in lows]
    return grade(all(held), any(held)), (
        f"lowest S over {KEYS} keys of width {width} with the best query: "
        + ", ".join(f"{name} {one}" for name, one in found.items())
    )


@claim(
    SU,
    EXPERIMENT,
    "More feature dimensions make linear attention sparser.",
    refuted="S does not fall for either.",
)
def _dimensions(results: Results) -> Finding:
    """Best query, 4 to 64 feature dimensions: holds if S falls for relu and for elu + 1, interval against
    interval; with limits if for one.
    """
    held, parts = [], []
    for name in ("linear-relu", "linear-elu1"):
        ends = [_lowest(results, name, width) for width in (WIDTHS[0], WIDTHS[-1])]
        low = ends[0].lower
        high = ends[1].upper
        held.append(high < low)
        parts.append(f"{name} {ends[0]} → {ends[1]}")
    return grade(all(held), any(held)), (
        f"lowest S with the best query from {WIDTHS[0]} to {WIDTHS[-1]} feature dimensions:"
        f" {', '.join(parts)}"
    )


@claim(
    SU,
    EXPERIMENT,
    "A bias of the keys helps relu² to be sparse.",
    refuted="The best bias is none, or gains less than a fifth.",
)
def _key_bias(results: Results) -> Finding:
    """Queries without and with a common part, best of five lengths of the bias: holds if S falls by a
    fifth in both cases, interval against interval; with limits if in one.
    """
    rows = results.rows("bias of keys")

    def best(common: float) -> tuple[Estimate, Estimate, float]:
        own = [row for row in rows if row["common"] == common]
        by_length = {
            x: t_interval([r["S"] for r in own if r["length"] == x])
            for x in sorted({r["length"] for r in own})
        }
        length = min(by_length, key=lambda x: by_length[x].value)
        return by_length[0.0], by_length[length], length

    helps, said = [], []
    for common, words in ((0.0, "without"), (1.0, "with")):
        plain, biased, length = best(common)
        low = plain.lower
        high = biased.upper
        helps.append(high < 0.8 * low)
        said.append(f"{words} a common part of the queries {plain} → {biased} at length {length:g}")
    return grade(
        all(helps), any(helps)
    ), f"S of relu² without and with the best bias of keys: {'; '.join(said)}"


@claim(
    SU,
    EXPERIMENT,
    "Linear attention that is sparse by its features looks at absolute positions only: the same columns"
    " for all queries.",
    refuted="Queries share their heaviest key no more often than under softmax.",
)
def _absolute_positions(results: Results) -> Finding:
    """Features of growing spread: holds if S falls, and at the largest spread two queries share their
    heaviest key in more than half of the cases and more often than under softmax; with limits if only
    more often.
    """
    rows = results.rows("columns")

    def of(name: str, spread: float, field: str) -> Estimate:
        return t_interval([r[field] for r in rows if r["mechanism"] == name and r["spread"] == spread])

    first, last = SPREADS[0], SPREADS[-1]
    linear, softmax = of("linear", last, "same"), of("softmax", last, "same")
    low = linear.lower
    high = softmax.upper
    sparser = of("linear", last, "S").value < of("linear", first, "S").value
    return grade(sparser and low > 0.5 and low > high, sparser and low > high), (
        f"S of linear attention falls from {of('linear', first, 'S').value:.2f} to"
        f" {of('linear', last, 'S').value:.2f} as features get sparser; two"
        f" queries then have the same heaviest key in {linear} of cases, under softmax in {softmax}"
    )


SECTION = Section(
    name="queries",
    order=72,
    facts=facts,
    claims=[_linear_flat, _dimensions, _key_bias, _absolute_positions],
)
