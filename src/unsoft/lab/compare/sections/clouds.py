"""Magnitude weights of random clouds: suppressed crowds, amplified edges, diversity of sets."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import normals
from unsoft.lab.compare.jobs import Job, Results, Rows, mean_of
from unsoft.lab.compare.section import EXPERIMENT, ROSIC, Finding, Request, Section, claim, job
from unsoft.lab.compare.sections.geometry import similarities
from unsoft.lab.evidence import grade
from unsoft.magnitude import weighting


def facts(request: Request) -> list[Job]:
    draws = max(request.level.draws, 4)
    return [
        job("clouds", None, clouds, 0.5, draws=draws),
        job("diversity", None, diversity, 0.5, draws=draws),
    ]


def clouds(draws: int) -> Rows:
    """Correlate magnitude weights with density and with distance from the middle, in clouds with crowds."""
    rows = []
    for draw in range(draws):
        normal = normals(1100 + draw)
        crowds = (normal(8, 1, 2) + 0.3 * normal(8, 8, 2)).flatten(0, 1)
        keys = torch.cat([crowds, 1.5 * normal(32, 2)]) * math.sqrt(2)
        weights = weighting(keys, t=1.0, eps=1e-6, solver="cholesky", throw=False).weights
        density = similarities(keys, 1.0).sum(-1)
        away = (keys - keys.mean(0)).norm(dim=-1)
        rows.append(
            {
                "draw": draw,
                "density": spearman(density, weights),
                "edge": spearman(away, weights),
                "negative": float((weights < 0).double().mean()),
            }
        )
    return rows


def diversity(draws: int) -> Rows:
    """Compare magnitude with the largest diversity of a distribution over the keys, 1 / min p'Zp."""
    rows = []
    for draw, spread in itertools.product(range(draws), (0.5, 1.0, 3.0)):
        z = similarities(spread * normals(1200 + draw)(16, 2), 1.0)
        weights = torch.linalg.solve(z, torch.ones(len(z), dtype=torch.float64))
        row = {"draw": draw, "spread": spread, "magnitude": float(weights.sum())}
        rows.append(row | {"diversity": largest_diversity(z), "negative": int((weights < 0).sum())})
    return rows


def largest_diversity(z: Tensor) -> float:
    """Return 1 / min p'Zp over distributions p by an active-set search.

    The minimum is where the weights of the keys in use are positive and no other key would lower it (Leinster
    and Meckes 2016), so the key with the most negative weight is left out until none is negative.

    >>> largest_diversity(torch.eye(3, dtype=torch.float64))
    3.0
    """
    used = torch.ones(len(z), dtype=torch.bool)
    for _ in range(4 * len(z)):
        weights = torch.zeros(len(z), dtype=z.dtype)
        weights[used] = torch.linalg.solve(z[used][:, used], torch.ones(int(used.sum()), dtype=z.dtype))
        if bool((weights[used] < 0).any()):
            used[weights.argmin()] = False
            continue
        lacking = 1 - z @ weights  # positive: this key would add diversity
        lacking[used] = 0
        if float(lacking.max()) <= 1e-9:
            break
        used[lacking.argmax()] = True
    return float(weights.sum())


def spearman(x: Tensor, y: Tensor) -> float:
    """Return the rank correlation.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 5.0, 1.0]))
    -1.0
    """
    ranks = torch.stack([a.argsort().argsort().double() for a in (x, y)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


@claim(
    ROSIC, EXPERIMENT, "Keys in crowds are suppressed.", refuted="The interval reaches 0.", evidence="solver"
)
def _redundancy(results: Results) -> Finding:
    """Random clouds with crowds in two dimensions, interval over draws: supported if the rank correlation of
    density and weight is below −0.5; partly if it is below 0.
    """
    rows = results.rows("clouds")
    density, negative = mean_of(rows, "density"), mean_of(rows, "negative")
    return grade(density.upper < -0.5, density.upper < 0), (
        f"rank correlation of density and weight {density}; {negative.value:.0%} of the weights are negative"
    )


@claim(
    ROSIC,
    EXPERIMENT,
    "Unique keys and those at the edge are amplified.",
    refuted="The interval reaches 0.",
    evidence="solver",
)
def _edges(results: Results) -> Finding:
    """The same clouds: supported if the rank correlation of distance from the middle and weight is above 0.5;
    partly if it is above 0.
    """
    edge = mean_of(results.rows("clouds"), "edge")
    return grade(edge.lower > 0.5, edge.lower > 0), (
        f"rank correlation of the distance from the middle and weight {edge}"
    )


@claim(
    ROSIC,
    EXPERIMENT,
    "|X| is the maximum diversity of the set.",
    refuted="They differ in every set.",
    evidence="solver",
)
def _bound(results: Results) -> Finding:
    """16 random keys in two dimensions: supported if magnitude equals the largest diversity of any
    distribution to a millionth in every set; partly if in some.
    """
    rows = results.rows("diversity")
    off = [row for row in rows if abs(row["magnitude"] - row["diversity"]) > 1e-6 * row["diversity"]]
    negative = [row for row in rows if row["negative"]]
    worst = max(rows, key=lambda row: row["magnitude"] / row["diversity"])
    same = {(r["draw"], r["spread"]) for r in off} == {(r["draw"], r["spread"]) for r in negative}
    exactly, others = "exactly those with a negative weight", f"while {len(negative)} have a negative weight"
    return grade(not off, len(off) < len(rows)), (
        f"different in {len(off)} of {len(rows)} random sets, {exactly if same else others};"
        f" farthest apart: magnitude {worst['magnitude']:.2f}, largest diversity {worst['diversity']:.2f}"
    )


SECTION = Section(
    name="clouds",
    order=54,
    facts=facts,
    claims=[_redundancy, _edges, _bound],
)
