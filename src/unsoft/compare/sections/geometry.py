"""What are magnitude weights of sets whose answer is known, and of random ones? Clones, crowds, edges, diversity."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft.compare.claim import EXPERIMENT, ROSIC, THEOREM, Claim, Finding, grade
from unsoft.compare.estimate import Estimate, estimate
from unsoft.compare.jobs import Job, Results
from unsoft.compare.level import Level
from unsoft.compare.section import Section, job
from unsoft.magnitude import weighting

WIDTH, EPS = 64, 1e-9
RADII = (1e-3, 0.1, 1.0, 10.0, 1e3)


def facts(level: Level) -> list[Job]:
    draws = max(level.draws, 4)
    return [
        job("magnitude of sets", None, sets, 0.3),
        job("scales", None, scales, 0.1),
        job("clouds", None, partial(clouds, draws), 0.5, {"draws": draws}),
        job("diversity", None, partial(diversity, draws), 0.5, {"draws": draws}),
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
        rows.append({"set": "clones", "count": count, "expected": 1 / count, "found": float(found.mean()), "off": off})
    lonely = torch.cat([cloud(20, 0.1), cloud(1) + 40])
    rows.append({"set": "isolated", "count": 21, "expected": 1.0, "found": float(weighting(lonely, eps=EPS).weights[-1])})
    first, second = cloud(30, 0.5), cloud(40, 0.5) + 60
    parts = [float(weighting(x, eps=EPS).magnitude) for x in (first, second)]
    whole = float(weighting(torch.cat([first, second]), eps=EPS).magnitude)
    rows.append({"set": "far apart", "count": 70, "expected": sum(parts), "found": whole})
    for distance in (0.1, 0.5, 1.0, 2.0, 5.0):  # an equilateral triangle: 3 / (1 + 2 z)
        corners = distance * math.sqrt(WIDTH / 2) * torch.eye(3, WIDTH, dtype=torch.float64)
        expected = 3 / (1 + 2 * math.exp(-(distance**2)))
        found_total = float(weighting(corners, eps=EPS).magnitude)
        rows.append({"set": "triangle", "count": 3, "distance": distance, "expected": expected, "found": found_total})
    for count in (10, 100):
        z = _kernel(cloud(count), 1.0)
        rows.append({"set": "distinct", "count": count, "expected": 0.0, "found": float(torch.linalg.eigvalsh(z)[0])})
    return rows


def scales() -> list[dict[str, Any]]:
    """Magnitude of 32 random keys as t grows."""
    keys = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(15), dtype=torch.float64)
    return [
        {"t": t, "count": 32, "magnitude": float(weighting(keys, t=t, eps=EPS, solver="cholesky", throw=False).magnitude)} for t in RADII
    ]


def clouds(draws: int) -> list[dict[str, Any]]:
    """Rank correlations of weights with density and with distance from the middle, in clouds with crowds, and negative weights."""
    rows = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(1100 + draw)

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        crowds = (normal(8, 1, 2) + 0.3 * normal(8, 8, 2)).flatten(0, 1)
        keys = torch.cat([crowds, 1.5 * normal(32, 2)]) * math.sqrt(2)
        weights = weighting(keys, t=1.0, eps=1e-6, solver="cholesky", throw=False).weights
        density = _kernel(keys, 1.0).sum(-1)
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


def diversity(draws: int) -> list[dict[str, Any]]:
    """Magnitude, and the largest diversity that any distribution over the keys has: 1 / min p'Zp over the simplex."""
    rows = []
    for draw in range(draws):
        for spread in (0.5, 1.0, 3.0):
            generator = torch.Generator().manual_seed(1200 + draw)
            keys = spread * torch.randn(16, 2, generator=generator, dtype=torch.float64)
            z = _kernel(keys, 1.0)
            weights = torch.linalg.solve(z, torch.ones(len(z), dtype=torch.float64))
            rows.append(
                {
                    "draw": draw,
                    "spread": spread,
                    "magnitude": float(weights.sum()),
                    "diversity": largest_diversity(z),
                    "negative": int((weights < 0).sum()),
                }
            )
    return rows


def largest_diversity(z: Tensor) -> float:
    """1 / min p'Zp over distributions p: the key with the most negative weight is left out until none is negative.

    The minimum lies where the weights of the keys that it uses are positive, and no other key would lower it (Leinster and Meckes 2016).

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


def _kernel(keys: Tensor, t: float) -> Tensor:
    return torch.exp(-t * (keys[:, None] - keys).square().sum(-1) / keys.shape[-1])


def spearman(x: Tensor, y: Tensor) -> float:
    """Rank correlation.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 5.0, 1.0]))
    -1.0
    """
    ranks = torch.stack([a.argsort().argsort().double() for a in (x, y)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


def _set(results: Results, name: str) -> list[dict[str, Any]]:
    return [row for row in results.rows("magnitude of sets") if row["set"] == name]


def _clones(results: Results) -> Finding:
    rows = _set(results, "clones")
    off = max(row["off"] for row in rows)
    return grade(off < 1e-4), f"largest deviation of a single weight from 1/N: {off:.1g}, for {', '.join(str(r['count']) for r in rows)} clones"


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
        f"three keys count as {ends[0]:.3f} at distance {rows[0]['distance']:g} and as {ends[1]:.3f} at {rows[-1]['distance']:g}; largest distance"
        f" from 3/(1 + 2z): {off:.1g}"
    )


def _invertible(results: Results) -> Finding:
    rows = _set(results, "distinct")
    least = min(row["found"] for row in rows)
    return grade(least > 0), f"smallest eigenvalue of Z for {' and '.join(str(r['count']) for r in rows)} distinct random keys: {least:.3g}"


def _radius(results: Results) -> Finding:
    rows = results.rows("scales")
    found = [row["magnitude"] for row in rows]
    rises = all(a < b for a, b in zip(found, found[1:], strict=False))
    ends = found[0] < 1.1 and found[-1] > 0.99 * rows[0]["count"]
    return grade(rises and ends, rises), (
        f"{rows[0]['count']} keys count as {found[0]:.3f} at t = {rows[0]['t']:g} and as {found[-1]:.3f} at t = {rows[-1]['t']:g}"
    )


def _cloud(results: Results, field: str) -> Estimate:
    return estimate([row[field] for row in results.rows("clouds")])


def _redundancy(results: Results) -> Finding:
    found, negative = _cloud(results, "density"), _cloud(results, "negative")
    high = found.value if found.high is None else found.high
    return grade(high < -0.5, high < 0), f"rank correlation of density and weight {found}; {negative.value:.0%} of the weights are negative"


def _edges(results: Results) -> Finding:
    found = _cloud(results, "edge")
    low = found.value if found.low is None else found.low
    return grade(low > 0.5, low > 0), f"rank correlation of the distance from the middle and weight {found}"


def _diversity(results: Results) -> Finding:
    rows = results.rows("diversity")
    off = [row for row in rows if abs(row["magnitude"] - row["diversity"]) > 1e-6 * row["diversity"]]
    negative = [row for row in rows if row["negative"]]
    worst = max(rows, key=lambda row: row["magnitude"] / row["diversity"])
    same = {(r["draw"], r["spread"]) for r in off} == {(r["draw"], r["spread"]) for r in negative}
    return grade(not off, len(off) < len(rows)), (
        f"different in {len(off)} of {len(rows)} random sets, "
        + ("exactly those with a negative weight" if same else f"while {len(negative)} have a negative weight")
        + f"; farthest apart: magnitude {worst['magnitude']:.2f}, largest diversity {worst['diversity']:.2f}"
    )


_THEOREMS = (
    ("clones-share", "N identical keys get the weight 1/N each.", "The largest deviation of any weight from 1/N is below 1e-4 of it, N = 2, 10, 50.", _clones),
    ("isolated", "An isolated key keeps the weight 1.", "To 1e-4.", _isolated),
    ("additive", "Magnitude is additive over sets that are far apart.", "To a millionth.", _additive),
    ("three-keys", "Three keys count as three, as one, or as something between.", "3/(1 + 2z) to 1e-6; below 1.1 when near, above 2.9 when far.", _triangle),
    ("invertible", "The Gaussian kernel is strictly positive definite for distinct keys.", "The smallest eigenvalue is above 0 in float64.", _invertible),
    ("radius", "A high t is strict, a low t broad.", "Magnitude rises with t, from below 1.1 to within 1 % of the number of keys.", _radius),
)
_EXPERIMENTS = (
    (
        "redundancy",
        "Keys in crowds are suppressed.",
        "Random clouds with crowds in two dimensions, interval over draws: holds if the rank correlation of density and weight is below −0.5; with"
        " limits if it is below 0.",
        "The interval reaches 0.",
        _redundancy,
    ),
    (
        "edges",
        "Unique keys and those at the edge are amplified.",
        "The same clouds: holds if the rank correlation of distance from the middle and weight is above 0.5; with limits if it is above 0.",
        "The interval reaches 0.",
        _edges,
    ),
    (
        "bound",
        "|X| is the maximum diversity of the set.",
        "16 random keys in two dimensions: holds if magnitude equals the largest diversity of any distribution to a millionth in every set; with limits"
        " if in some.",
        "They differ in every set.",
        _diversity,
    ),
)
SECTION = Section(
    name="geometry",
    order=52,
    facts=facts,
    claims=[
        *(Claim(name, ROSIC, text, THEOREM, rule, check=check, evidence="solver") for name, text, rule, check in _THEOREMS),
        *(Claim(name, ROSIC, text, EXPERIMENT, rule, no, check, evidence="solver") for name, text, rule, no, check in _EXPERIMENTS),
    ],
)
