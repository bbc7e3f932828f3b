"""Sparsity S for chosen queries: linear attention, dimensions, bias of keys, columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import elu

from unsoft import measure
from unsoft.lab.compare.candidate import normals
from unsoft.lab.compare.jobs import Results, RowIterator, matching, mean_of
from unsoft.lab.compare.section import SU, Finding, Section
from unsoft.lab.evidence import Estimate, grade

KEYS, STEPS, STARTS = 256, 80, 2
WIDTHS = (4, 16, 64)
SPREADS = (0.5, 1.0, 2.0, 4.0)
QUERIES: dict[str, Callable[[Tensor], Tensor]] = {
    "even": torch.special.ndtr,
    "half zero": torch.relu,
    "sparse": lambda x: (4 * x).exp(),
}
"""Non-negative features of a normal query: uniform in [0, 1], relu, and nearly a single one."""


def _softmax(query: Tensor, key: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT, -1)


def _linear(query: Tensor, key: Tensor, feature: Callable[[Tensor], Tensor]) -> Tensor:
    weights = feature(query) @ feature(key).mT
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear-relu": torch.relu,
    "linear-elu1": lambda x: elu(x) + 1,
}
MECHANISMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": _softmax,
    **{name: partial(_linear, feature=feature) for name, feature in FEATURES.items()},
}
"""Written out, so that queries of any length can be searched."""


SECTION = Section(order=72)


@SECTION.fact(3.0)
def best_queries(draws: int) -> RowIterator:
    """Find the lowest S of a row over 256 normal keys by gradient descent on the query, with |q| ≤ 16."""
    for width, (name, weigh) in itertools.product(WIDTHS, MECHANISMS.items()):
        normal = normals(800 + width, torch.float32)
        keys, query = normal(draws, KEYS, width), normal(draws, STARTS, width).requires_grad_()
        optimiser = torch.optim.Adam([query], lr=0.1)
        for _ in range(STEPS):
            optimiser.zero_grad()
            measure.sparsity(weigh(query, keys)).sum().backward()
            optimiser.step()
            with torch.no_grad():
                query *= (16 / query.norm(dim=-1, keepdim=True)).clamp(max=1)
        with torch.no_grad():
            lowest = measure.sparsity(weigh(query, keys)).amin(-1)
            if name in FEATURES:  # a query for a single feature, which descent may miss
                lowest = torch.minimum(lowest, measure.sparsity(FEATURES[name](keys).mT).amin(-1))
        for draw, x in enumerate(lowest):
            yield {"mechanism": name, "width": width, "draw": draw, "S": float(x)}


@SECTION.fact(0.5, name="bias of keys")
def key_bias(draws: int) -> RowIterator:
    """Measure the mean S of relu² over 64 queries, with and without a common part, by the bias of keys.

    The bias points against the mean of the queries.
    """
    for draw in range(draws):
        normal = normals(900 + draw)
        keys, queries = normal(1024, 16), normal(64, 16)
        for common in (0.0, 1.0):
            asked = (queries + common * torch.ones(16, dtype=torch.float64)) / 4
            bias = -asked.mean(0) / asked.mean(0).norm()
            for length in (0.0, 1.0, 2.0, 4.0, 8.0):
                weights = (asked @ (keys + length * bias).mT).relu().square()
                seen = weights[weights.sum(-1) > 0]
                row = {"common": common, "length": length, "draw": draw}
                row |= {"S": float(measure.sparsity(seen).mean()) if len(seen) else 1.0}
                yield row | {"empty": 1 - len(seen) / len(weights)}


@SECTION.fact(0.2, draws=lambda level: 4 * level.draws)
def columns(draws: int) -> RowIterator:
    """Measure S of linear attention with sparse features, and how often queries share their heaviest key.

    Linear attention and softmax get the same queries: non-negative features of length 4, of three kinds.
    The keys are N(0, spread^2) under softmax; linear attention has their exponentials as features.
    """
    for spread, draw, (kind, feature) in itertools.product(SPREADS, range(draws), QUERIES.items()):
        normal = normals(1000 + draw)
        key, query = spread * normal(KEYS, 16), feature(normal(64, 16))
        query = 4 * query / query.norm(dim=-1, keepdim=True)
        for name, weights in (("linear", query @ key.exp().mT), ("softmax", _softmax(query / 4, key))):
            heaviest = weights.argmax(-1)
            same = (heaviest[:, None] == heaviest).double()
            pairs = (same.sum() - len(same)) / (len(same) * (len(same) - 1))
            row = {"mechanism": name, "queries": kind, "spread": spread, "draw": draw}
            yield row | {"S": float(measure.sparsity(weights).mean()), "same": float(pairs)}


def _lowest(results: Results, name: str, width: int) -> Estimate:
    return mean_of(results.rows("best queries", width=width), "S", mechanism=name)


@SECTION.experiment(SU, "Linear attention is harder to focus than softmax.")
def _linear_flat(results: Results) -> Finding:
    """The query is chosen by gradient descent for the lowest S over 256 keys, interval over draws: supported
    if linear attention with relu and with elu + 1 both stay above twice softmax's S; partly if one does.

    Refuted: With the best query both come within twice softmax's S.
    """
    width = WIDTHS[-1]
    lowest = {name: _lowest(results, name, width) for name in MECHANISMS}
    held = [lowest[name].lower > 2 * lowest["softmax"].upper for name in FEATURES]
    return grade(all(held), any(held)), (
        f"lowest S over {KEYS} keys of width {width} with the best query: "
        + ", ".join(f"{name} {one}" for name, one in lowest.items())
    )


@SECTION.experiment(SU, "More feature dimensions make linear attention sparser.")
def _dimensions(results: Results) -> Finding:
    """Best query, 4 to 64 feature dimensions: supported if S falls for relu and for elu + 1, interval
    against interval; partly if for one.

    Refuted: S does not fall for either.
    """
    held, parts = [], []
    for name in FEATURES:
        narrow, wide = (_lowest(results, name, width) for width in (WIDTHS[0], WIDTHS[-1]))
        held.append(wide.upper < narrow.lower)
        parts.append(f"{name} {narrow} → {wide}")
    return grade(all(held), any(held)), (
        f"lowest S with the best query from {WIDTHS[0]} to {WIDTHS[-1]} feature dimensions:"
        f" {', '.join(parts)}"
    )


@SECTION.experiment(SU, "A bias of the keys helps relu² to be sparse.")
def _key_bias(results: Results) -> Finding:
    """Queries without and with a common part, best of five lengths of the bias: supported if S falls by a
    fifth in both cases, interval against interval; partly if in one.

    Refuted: The best bias is none, or gains less than a fifth.
    """
    rows = results.rows("bias of keys")

    def best(common: float) -> tuple[Estimate, Estimate, float]:
        own = matching(rows, common=common)
        by_length = {x: mean_of(own, "S", length=x) for x in sorted({r["length"] for r in own})}
        length = min(by_length, key=lambda x: by_length[x].value)
        return by_length[0.0], by_length[length], length

    helps, cases = [], []
    for common, word in ((0.0, "without"), (1.0, "with")):
        plain, biased, length = best(common)
        helps.append(biased.upper < 0.8 * plain.lower)
        cases.append(f"{word} a common part of the queries {plain} → {biased} at length {length:g}")
    return grade(all(helps), any(helps)), (
        f"S of relu² without and with the best bias of keys: {'; '.join(cases)}"
    )


@SECTION.experiment(
    SU,
    "Linear attention that is sparse by its features looks at absolute positions only: the same columns"
    " for all queries.",
)
def _absolute_positions(results: Results) -> Finding:
    """Features of growing spread, three kinds of queries, the same for softmax: supported if for every
    kind S falls, and at the largest spread two queries share their heaviest key in more than half of the
    cases and more often than under softmax; partly if that is so for some kind.

    Refuted: For no kind of queries do most share their heaviest key.
    """
    rows, held, parts = results.rows("columns"), [], []
    for kind in QUERIES:
        own = matching(rows, queries=kind)
        first, last = (
            mean_of(own, "S", mechanism="linear", spread=x).value for x in (SPREADS[0], SPREADS[-1])
        )
        linear, softmax = (
            mean_of(own, "same", mechanism=name, spread=SPREADS[-1]) for name in ("linear", "softmax")
        )
        held.append(last < first and linear.lower > max(0.5, softmax.upper))
        parts.append(f"{kind} {linear} (softmax {softmax}), while S falls from {first:.2f} to {last:.2f}")
    return grade(all(held), any(held)), (
        "two queries have the same heaviest key under linear attention with sparse features, by kind of"
        f" queries: {'; '.join(parts)}"
    )
