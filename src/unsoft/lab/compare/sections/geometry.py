"""What are magnitude weights of sets whose answer is known, and of random ones? Clones, crowds, edges,
diversity.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.compare.jobs import Job, Results
from unsoft.lab.compare.section import ROSIC, THEOREM, Claim, ComparisonLevel, Finding, Section, job
from unsoft.lab.evidence import grade
from unsoft.magnitude import weighting

WIDTH, EPS = 64, 1e-9
RADII = (1e-3, 0.1, 1.0, 10.0, 1e3)


def facts(level: ComparisonLevel) -> list[Job]:
    return [
        job("magnitude of sets", None, sets, 0.3),
        job("scales", None, scales, 0.1),
    ]


def sets() -> list[dict[str, Any]]:
    """Magnitude weights of sets whose answer is known."""
    generator = torch.Generator().manual_seed(11)

    def cloud(count: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)

    rows: list[dict[str, Any]] = []
    for count in (2, 10, 50):
        found = weighting(cloud(1).expand(count, WIDTH), eps=EPS, solver="cholesky", throw=False).weights
        off = float((found * count - 1).abs().max())
        rows.append(
            {"set": "clones", "count": count, "expected": 1 / count, "found": float(found.mean()), "off": off}
        )
    lonely = torch.cat([cloud(20, 0.1), cloud(1) + 40])
    rows.append(
        {
            "set": "isolated",
            "count": 21,
            "expected": 1.0,
            "found": float(weighting(lonely, eps=EPS).weights[-1]),
        }
    )
    first, second = cloud(30, 0.5), cloud(40, 0.5) + 60
    parts = [float(weighting(x, eps=EPS).magnitude) for x in (first, second)]
    whole = float(weighting(torch.cat([first, second]), eps=EPS).magnitude)
    rows.append({"set": "far apart", "count": 70, "expected": sum(parts), "found": whole})
    for distance in (0.1, 0.5, 1.0, 2.0, 5.0):  # an equilateral triangle: 3 / (1 + 2 z)
        corners = distance * math.sqrt(WIDTH / 2) * torch.eye(3, WIDTH, dtype=torch.float64)
        expected = 3 / (1 + 2 * math.exp(-(distance**2)))
        found_total = float(weighting(corners, eps=EPS).magnitude)
        rows.append(
            {"set": "triangle", "count": 3, "distance": distance, "expected": expected, "found": found_total}
        )
    for count in (10, 100):
        z = similarities(cloud(count), 1.0)
        rows.append(
            {"set": "distinct", "count": count, "expected": 0.0, "found": float(torch.linalg.eigvalsh(z)[0])}
        )
    return rows


def scales() -> list[dict[str, Any]]:
    """Magnitude of 32 random keys as t grows."""
    keys = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(15), dtype=torch.float64)
    return [
        {
            "t": t,
            "count": 32,
            "magnitude": float(weighting(keys, t=t, eps=EPS, solver="cholesky", throw=False).magnitude),
        }
        for t in RADII
    ]


def similarities(keys: Tensor, t: float) -> Tensor:
    return torch.exp(-t * (keys[:, None] - keys).square().sum(-1) / keys.shape[-1])


def _set(results: Results, name: str) -> list[dict[str, Any]]:
    return [row for row in results.rows("magnitude of sets") if row["set"] == name]


def _clones(results: Results) -> Finding:
    rows = _set(results, "clones")
    off = max(row["off"] for row in rows)
    return (
        grade(off < 1e-4),
        f"largest deviation of a single weight from 1/N: {off:.1g}, for"
        f" {', '.join(str(r['count']) for r in rows)} clones",
    )


def _isolated(results: Results) -> Finding:
    found = _set(results, "isolated")[0]["found"]
    return grade(abs(found - 1) < 1e-4), f"weight {found:.6f} of a key far from twenty others"


def _additive(results: Results) -> Finding:
    row = _set(results, "far apart")[0]
    return grade(abs(row["found"] - row["expected"]) < 1e-6 * row["expected"]), (
        f"the union has {row['found']:.6f}, its parts together {row['expected']:.6f}"
    )


def _triangle(results: Results) -> Finding:
    rows = _set(results, "triangle")
    off = max(abs(row["found"] - row["expected"]) for row in rows)
    ends = rows[0]["found"], rows[-1]["found"]
    return grade(off < 1e-6 and ends[0] < 1.1 and ends[1] > 2.9), (
        f"three keys count as {ends[0]:.3f} at distance {rows[0]['distance']:g} and as {ends[1]:.3f} at"
        f" {rows[-1]['distance']:g}; largest distance from 3/(1 + 2z): {off:.1g}"
    )


def _invertible(results: Results) -> Finding:
    rows = _set(results, "distinct")
    least = min(row["found"] for row in rows)
    return (
        grade(least > 0),
        f"smallest eigenvalue of Z for {' and '.join(str(r['count']) for r in rows)} distinct random keys:"
        f" {least:.3g}",
    )


def _radius(results: Results) -> Finding:
    rows = results.rows("scales")
    found = [row["magnitude"] for row in rows]
    rises = all(a < b for a, b in zip(found, found[1:], strict=False))
    ends = found[0] < 1.1 and found[-1] > 0.99 * rows[0]["count"]
    return grade(rises and ends, rises), (
        f"{rows[0]['count']} keys count as {found[0]:.3f} at t = {rows[0]['t']:g} and as {found[-1]:.3f} at"
        f" t = {rows[-1]['t']:g}"
    )


_THEOREMS = (
    (
        "clones-share",
        "N identical keys get the weight 1/N each.",
        "The largest deviation of any weight from 1/N is below 1e-4 of it, N = 2, 10, 50.",
        _clones,
    ),
    ("isolated", "An isolated key keeps the weight 1.", "To 1e-4.", _isolated),
    ("additive", "Magnitude is additive over sets that are far apart.", "To a millionth.", _additive),
    (
        "three-keys",
        "Three keys count as three, as one, or as something between.",
        "3/(1 + 2z) to 1e-6; below 1.1 when near, above 2.9 when far.",
        _triangle,
    ),
    (
        "invertible",
        "The Gaussian kernel is strictly positive definite for distinct keys.",
        "The smallest eigenvalue is above 0 in float64.",
        _invertible,
    ),
    (
        "radius",
        "A high t is strict, a low t broad.",
        "Magnitude rises with t, from below 1.1 to within 1 % of the number of keys.",
        _radius,
    ),
)
SECTION = Section(
    name="geometry",
    order=52,
    facts=facts,
    claims=[
        *(
            Claim(name, ROSIC, text, THEOREM, rule, check=check, evidence="solver")
            for name, text, rule, check in _THEOREMS
        ),
    ],
)
