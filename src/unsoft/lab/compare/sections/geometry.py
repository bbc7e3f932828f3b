"""Magnitude weights of sets with a known answer and of random sets: clones, crowds, edges, diversity.

Random sets are judged at the width of a head. Two dimensions are the limit case: there many keys lie within
each other's radius, so that Z is nearly singular.
"""

from __future__ import annotations

import decimal
import itertools
import math

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import WIDTH, normals
from unsoft.lab.compare.jobs import Results, RowIterator, Rows, matching, mean_of
from unsoft.lab.compare.section import ROSIC, Finding, Section
from unsoft.lab.evidence import grade
from unsoft.magnitude import weighting

EPS = 1e-9
RADII = (1e-3, 0.1, 1.0, 10.0, 1e3)
FLAT = 2
"""The width of the limit case."""
DISTINCT = ((32, WIDTH), (10, FLAT), (100, FLAT))
"""Keys and width of the sets whose matrix must be positive definite; the last is singular in float64."""
DIGITS = 50


SECTION = Section(order=52, evidence="solver")


@SECTION.fact(0.3, name="magnitude of sets")
def sets() -> Rows:
    """Compute magnitude weights of sets whose answer is known."""
    normal = normals(11)

    def cloud(count: int, size: float = 1.0) -> Tensor:
        return size * normal(count, WIDTH)

    rows: Rows = []

    def add(kind: str, count: int, expected: float, value: Tensor | float, **more: float) -> None:
        rows.append({"set": kind, "count": count, "expected": expected, "found": float(value), **more})

    for count in (2, 10, 50):
        weights = weighting(cloud(1).expand(count, WIDTH), eps=EPS, solver="cholesky", throw=False).weights
        add("clones", count, 1 / count, weights.mean(), off=float((weights * count - 1).abs().max()))
    lonely = torch.cat([cloud(20, 0.1), cloud(1) + 40])
    add("isolated", 21, 1.0, weighting(lonely, eps=EPS).weights[-1])
    first, second = cloud(30, 0.5), cloud(40, 0.5) + 60
    parts = [float(weighting(x, eps=EPS).magnitude) for x in (first, second)]
    add("far apart", 70, sum(parts), weighting(torch.cat([first, second]), eps=EPS).magnitude)
    for distance in (0.1, 0.5, 1.0, 2.0, 5.0):  # an equilateral triangle: 3 / (1 + 2 z)
        corners = distance * math.sqrt(WIDTH / 2) * torch.eye(3, WIDTH, dtype=torch.float64)
        expected = 3 / (1 + 2 * math.exp(-(distance**2)))
        add("triangle", 3, expected, weighting(corners, eps=EPS).magnitude, distance=distance)
    return rows


@SECTION.fact(1.0)
def pivots() -> RowIterator:
    """Measure how far Z of distinct keys is from singular: its smallest eigenvalue and its smallest pivot.

    A symmetric matrix is positive definite if and only if all pivots of Gaussian elimination are positive.
    They are computed with 50 digits, because eigenvalues below 1e-14 are lost to rounding in float64.
    """
    for count, width in DISTINCT:
        keys = normals(16)(count, width)
        eigenvalue = float(torch.linalg.eigvalsh(similarities(keys, 1.0))[0])
        pivot = smallest_pivot(keys)
        row = {"count": count, "width": width, "eigenvalue": eigenvalue, "positive": pivot > 0}
        yield row | {"pivot": f"{pivot:.1e}"}


def smallest_pivot(keys: Tensor) -> decimal.Decimal:
    """Return the smallest pivot of Z (t = 1) without rows exchanged, with 50 digits.

    >>> float(smallest_pivot(torch.tensor([[0.0], [1.0]])))  # 1 - exp(-1)^2
    0.8646647167633873
    """
    with decimal.localcontext(decimal.Context(prec=DIGITS)):
        points = [[decimal.Decimal(x) for x in key] for key in keys.tolist()]
        width = len(points[0])

        def similarity(x: list[decimal.Decimal], y: list[decimal.Decimal]) -> decimal.Decimal:
            squares = ((a - b) ** 2 for a, b in zip(x, y, strict=True))
            return (-sum(squares, decimal.Decimal()) / width).exp()

        left = [[similarity(x, y) for y in points[: i + 1]] for i, x in enumerate(points)]
        found = []
        for k, row in enumerate(left):
            found.append(row[k])
            if not row[k]:
                break
            column = [below[k] for below in left[k + 1 :]]
            for i, below in enumerate(left[k + 1 :]):
                factor = below[k] / row[k]
                for j in range(k + 1, k + 2 + i):
                    below[j] -= factor * column[j - k - 1]
        return min(found)


@SECTION.fact(0.1)
def scales() -> RowIterator:
    """Compute the magnitude of 32 random keys as t grows."""
    keys = normals(15)(32, WIDTH)
    for t in RADII:
        magnitude = weighting(keys, t=t, eps=EPS, solver="cholesky", throw=False).magnitude
        yield {"t": t, "count": 32, "magnitude": float(magnitude)}


def similarities(keys: Tensor, t: float) -> Tensor:
    return torch.exp(-t * (keys[:, None] - keys).square().sum(-1) / keys.shape[-1])


@SECTION.fact(0.5, draws=lambda level: max(level.draws, 4))
def clouds(draws: int) -> RowIterator:
    """Correlate magnitude weights with density and with distance from the middle, in clouds with crowds.

    The weights are those of the mechanism's default, five steps with a ridge of 0.1. In two dimensions also
    the nearly exact ones: a ridge of 1e-6.
    """
    for draw, (width, eps) in itertools.product(range(draws), ((WIDTH, 0.1), (FLAT, 0.1), (FLAT, 1e-6))):
        normal = normals(1100 + draw)
        crowds = (normal(8, 1, width) + 0.3 * normal(8, 8, width)).flatten(0, 1)
        keys = torch.cat([crowds, 1.5 * normal(32, width)]) * math.sqrt(2)
        exact = eps < 0.1
        how = {"solver": "cholesky"} if exact else {"solver": "cg", "iterations": 5}
        weights = weighting(keys, t=1.0, eps=eps, throw=False, **how).weights
        density = similarities(keys, 1.0).sum(-1)
        away = (keys - keys.mean(0)).norm(dim=-1)
        row = {"draw": draw, "width": width, "eps": eps, "density": spearman(density, weights)}
        yield row | {"edge": spearman(away, weights)}


@SECTION.fact(0.5, draws=lambda level: max(level.draws, 4))
def diversity(draws: int) -> RowIterator:
    """Compare magnitude with the largest diversity of a distribution over the keys, 1 / min p'Zp."""
    for width, draw, spread in itertools.product((WIDTH, FLAT), range(draws), (0.5, 1.0, 3.0)):
        z = similarities(spread * normals(1200 + draw)(16, width), 1.0)
        weights = torch.linalg.solve(z, torch.ones(len(z), dtype=torch.float64))
        row = {"width": width, "draw": draw, "spread": spread, "magnitude": float(weights.sum())}
        yield row | {"diversity": largest_diversity(z), "negative": int((weights < 0).sum())}


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


def _set(results: Results, name: str) -> Rows:
    return results.rows("magnitude of sets", set=name)


@SECTION.theorem(ROSIC, "N identical keys get the weight 1/N each.")
def _clones_share(results: Results) -> Finding:
    """The largest deviation of any weight from 1/N is below 1e-4 of it, N = 2, 10, 50."""
    rows = _set(results, "clones")
    off = max(row["off"] for row in rows)
    counts = ", ".join(str(row["count"]) for row in rows)
    return grade(off < 1e-4), f"largest deviation of a single weight from 1/N: {off:.1g}, for {counts} clones"


@SECTION.theorem(ROSIC, "An isolated key keeps the weight 1.")
def _isolated(results: Results) -> Finding:
    """To 1e-4."""
    weight = _set(results, "isolated")[0]["found"]
    return grade(abs(weight - 1) < 1e-4), f"weight {weight:.6f} of a key far from twenty others"


@SECTION.theorem(ROSIC, "Magnitude is additive over sets that are far apart.")
def _additive(results: Results) -> Finding:
    """To a millionth."""
    row = _set(results, "far apart")[0]
    return grade(abs(row["found"] - row["expected"]) < 1e-6 * row["expected"]), (
        f"the union has {row['found']:.6f}, its parts together {row['expected']:.6f}"
    )


@SECTION.theorem(ROSIC, "Three keys count as three, as one, or as something between.")
def _three_keys(results: Results) -> Finding:
    """3/(1 + 2z) to 1e-6; below 1.1 when near, above 2.9 when far."""
    rows = _set(results, "triangle")
    off = max(abs(row["found"] - row["expected"]) for row in rows)
    ends = rows[0]["found"], rows[-1]["found"]
    return grade(off < 1e-6 and ends[0] < 1.1 and ends[1] > 2.9), (
        f"three keys count as {ends[0]:.3f} at distance {rows[0]['distance']:g} and as {ends[1]:.3f} at"
        f" {rows[-1]['distance']:g}; largest distance from 3/(1 + 2z): {off:.1g}"
    )


@SECTION.theorem(ROSIC, "The Gaussian kernel is strictly positive definite for distinct keys.")
def _invertible(results: Results) -> Finding:
    """32 random keys of width 64, 10 and 100 of width 2: supported if all pivots of Gaussian elimination with
    50 digits are positive in all three sets; partly if in that of width 64. The smallest eigenvalue in
    float64 is reported, not judged.
    """
    rows = results.rows("pivots")
    wide = matching(rows, width=WIDTH)
    values = "; ".join(
        f"{row['count']} keys of width {row['width']}: {row['pivot']} (float64: smallest eigenvalue"
        f" {row['eigenvalue']:.2g})"
        for row in rows
    )
    return grade(all(row["positive"] for row in rows), all(row["positive"] for row in wide)), (
        f"smallest pivot of Z: {values}; below about 1e-14 float64 cannot tell Z from a singular matrix"
    )


@SECTION.theorem(ROSIC, "A high t is strict, a low t broad.")
def _radius(results: Results) -> Finding:
    """Magnitude rises with t, from below 1.1 to within 1 % of the number of keys."""
    rows = results.rows("scales")
    counts = [row["magnitude"] for row in rows]
    rises = all(a < b for a, b in itertools.pairwise(counts))
    ends = counts[0] < 1.1 and counts[-1] > 0.99 * rows[0]["count"]
    return grade(rises and ends, rises), (
        f"{rows[0]['count']} keys count as {counts[0]:.3f} at t = {rows[0]['t']:g} and as {counts[-1]:.3f} at"
        f" t = {rows[-1]['t']:g}"
    )


@SECTION.experiment(ROSIC, "Keys in crowds are suppressed.")
def _redundancy(results: Results) -> Finding:
    """Random clouds with crowds, width 64, default ridge 0.1 and 5 steps, interval over draws: supported
    if the rank correlation of density and weight is below −0.5; partly if it is below 0. Two dimensions
    are shown as the limit case and not judged.

    Refuted: The interval reaches 0.
    """
    density = mean_of(results.rows("clouds"), "density", width=WIDTH)
    return grade(density.upper < -0.5, density.upper < 0), _correlations(results, "density", "density")


@SECTION.experiment(ROSIC, "Unique keys and those at the edge are amplified.")
def _edges(results: Results) -> Finding:
    """The same clouds, width 64, default ridge: supported if the rank correlation of distance from the
    middle and weight is above 0.5; partly if it is above 0. Two dimensions are shown and not judged.

    Refuted: The interval reaches 0.
    """
    edge = mean_of(results.rows("clouds"), "edge", width=WIDTH)
    return grade(edge.lower > 0.5, edge.lower > 0), _correlations(results, "edge", "distance from the middle")


def _correlations(results: Results, field: str, title: str) -> str:
    rows = results.rows("clouds")
    judged, ridge, bare = (
        mean_of(rows, field, width=width, eps=eps) for width, eps in ((WIDTH, 0.1), (FLAT, 0.1), (FLAT, 1e-6))
    )
    return (
        f"rank correlation of {title} and weight {judged} at width {WIDTH} with ε = 0.1; in {FLAT} dimensions"
        f" {ridge} with ε = 0.1 and {bare} with ε = 1e-6, where Z is nearly singular"
    )


@SECTION.experiment(ROSIC, "|X| is the maximum diversity of the set.")
def _bound(results: Results) -> Finding:
    """Sets of 16 random keys of width 64 and of width 2: supported if magnitude equals the largest
    diversity of any distribution to a millionth in every set; partly if it is never below it and equal in
    at least half of the sets of width 64.

    Refuted: They differ in more than half of the sets of width 64, or magnitude is smaller in some set.
    """
    rows = results.rows("diversity")
    off = [row for row in rows if abs(row["magnitude"] - row["diversity"]) > 1e-6 * row["diversity"]]
    below = [row for row in off if row["magnitude"] < row["diversity"]]
    counts = {
        width: (len(matching(off, width=width)), len(matching(rows, width=width))) for width in (WIDTH, FLAT)
    }
    worst = max(rows, key=lambda row: row["magnitude"] / row["diversity"])
    mostly = 2 * counts[WIDTH][0] <= counts[WIDTH][1]
    return grade(not off, mostly and not below), (
        f"different in {counts[WIDTH][0]} of {counts[WIDTH][1]} random sets of width {WIDTH} and in"
        f" {counts[FLAT][0]} of {counts[FLAT][1]} of width {FLAT}, below it in {len(below)};"
        f" {sum(bool(row['negative']) for row in rows)} sets have a negative weight; farthest apart:"
        f" magnitude {worst['magnitude']:.2f}, largest diversity {worst['diversity']:.2f}"
    )
