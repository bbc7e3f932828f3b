"""Magnitude weights of sets with a known answer and of random sets: clones, crowds, edges, diversity."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import normals
from unsoft.lab.compare.jobs import Job, Results, Rows
from unsoft.lab.compare.section import ROSIC, THEOREM, Finding, Request, Section, claim, job
from unsoft.lab.evidence import grade
from unsoft.magnitude import weighting

WIDTH, EPS = 64, 1e-9
RADII = (1e-3, 0.1, 1.0, 10.0, 1e3)


def facts(request: Request) -> list[Job]:
    return [job("magnitude of sets", None, sets, 0.3), job("scales", None, scales, 0.1)]


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
    for count in (10, 100):
        add("distinct", count, 0.0, torch.linalg.eigvalsh(similarities(cloud(count), 1.0))[0])
    return rows


def scales() -> Rows:
    """Compute the magnitude of 32 random keys as t grows."""
    keys = normals(15)(32, WIDTH)
    values = [weighting(keys, t=t, eps=EPS, solver="cholesky", throw=False).magnitude for t in RADII]
    return [{"t": t, "count": 32, "magnitude": float(x)} for t, x in zip(RADII, values, strict=True)]


def similarities(keys: Tensor, t: float) -> Tensor:
    return torch.exp(-t * (keys[:, None] - keys).square().sum(-1) / keys.shape[-1])


def _set(results: Results, name: str) -> Rows:
    return results.rows("magnitude of sets", set=name)


@claim(ROSIC, THEOREM, "N identical keys get the weight 1/N each.", evidence="solver")
def _clones_share(results: Results) -> Finding:
    """The largest deviation of any weight from 1/N is below 1e-4 of it, N = 2, 10, 50."""
    rows = _set(results, "clones")
    off = max(row["off"] for row in rows)
    return (
        grade(off < 1e-4),
        f"largest deviation of a single weight from 1/N: {off:.1g}, for"
        f" {', '.join(str(r['count']) for r in rows)} clones",
    )


@claim(ROSIC, THEOREM, "An isolated key keeps the weight 1.", evidence="solver")
def _isolated(results: Results) -> Finding:
    """To 1e-4."""
    weight = _set(results, "isolated")[0]["found"]
    return grade(abs(weight - 1) < 1e-4), f"weight {weight:.6f} of a key far from twenty others"


@claim(ROSIC, THEOREM, "Magnitude is additive over sets that are far apart.", evidence="solver")
def _additive(results: Results) -> Finding:
    """To a millionth."""
    row = _set(results, "far apart")[0]
    return grade(abs(row["found"] - row["expected"]) < 1e-6 * row["expected"]), (
        f"the union has {row['found']:.6f}, its parts together {row['expected']:.6f}"
    )


@claim(ROSIC, THEOREM, "Three keys count as three, as one, or as something between.", evidence="solver")
def _three_keys(results: Results) -> Finding:
    """3/(1 + 2z) to 1e-6; below 1.1 when near, above 2.9 when far."""
    rows = _set(results, "triangle")
    off = max(abs(row["found"] - row["expected"]) for row in rows)
    ends = rows[0]["found"], rows[-1]["found"]
    return grade(off < 1e-6 and ends[0] < 1.1 and ends[1] > 2.9), (
        f"three keys count as {ends[0]:.3f} at distance {rows[0]['distance']:g} and as {ends[1]:.3f} at"
        f" {rows[-1]['distance']:g}; largest distance from 3/(1 + 2z): {off:.1g}"
    )


@claim(
    ROSIC, THEOREM, "The Gaussian kernel is strictly positive definite for distinct keys.", evidence="solver"
)
def _invertible(results: Results) -> Finding:
    """The smallest eigenvalue is above 0 in float64."""
    rows = _set(results, "distinct")
    least = min(row["found"] for row in rows)
    return (
        grade(least > 0),
        f"smallest eigenvalue of Z for {' and '.join(str(r['count']) for r in rows)} distinct random keys:"
        f" {least:.3g}",
    )


@claim(ROSIC, THEOREM, "A high t is strict, a low t broad.", evidence="solver")
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


SECTION = Section(
    name="geometry",
    order=52,
    facts=facts,
    claims=[_clones_share, _isolated, _additive, _three_keys, _invertible, _radius],
)
