"""Are crowds suppressed and edges amplified? Magnitude weights of random clouds, and diversity of sets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.compare.jobs import Job, Results
from unsoft.lab.compare.section import EXPERIMENT, ROSIC, Claim, ComparisonLevel, Finding, Section, job
from unsoft.lab.compare.sections.geometry import similarities
from unsoft.lab.evidence import Estimate, grade, t_interval
from unsoft.magnitude import weighting


def facts(level: ComparisonLevel) -> list[Job]:
    draws = max(level.draws, 4)
    return [
        job("clouds", None, clouds, 0.5, draws=draws),
        job("diversity", None, diversity, 0.5, draws=draws),
    ]


def clouds(draws: int) -> list[dict[str, Any]]:
    """Rank correlations of weights with density and with distance from the middle, in clouds with crowds,
    and negative weights.
    """
    rows = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(1100 + draw)

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

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


def diversity(draws: int) -> list[dict[str, Any]]:
    """Magnitude, and the largest diversity that any distribution over the keys has: 1 / min p'Zp over the
    simplex.
    """
    rows = []
    for draw in range(draws):
        for spread in (0.5, 1.0, 3.0):
            generator = torch.Generator().manual_seed(1200 + draw)
            keys = spread * torch.randn(16, 2, generator=generator, dtype=torch.float64)
            z = similarities(keys, 1.0)
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
    """1 / min p'Zp over distributions p: the key with the most negative weight is left out until none is
    negative.

    The minimum lies where the weights of the keys that it uses are positive, and no other key would lower
    it (Leinster and Meckes 2016).

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
    """Rank correlation.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 5.0, 1.0]))
    -1.0
    """
    ranks = torch.stack([a.argsort().argsort().double() for a in (x, y)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


def _cloud(results: Results, field: str) -> Estimate:
    return t_interval([row[field] for row in results.rows("clouds")])


def _redundancy(results: Results) -> Finding:
    found, negative = _cloud(results, "density"), _cloud(results, "negative")
    high = found.upper
    return grade(
        high < -0.5, high < 0
    ), f"rank correlation of density and weight {found}; {negative.value:.0%} of the weights are negative"


def _edges(results: Results) -> Finding:
    found = _cloud(results, "edge")
    low = found.lower
    return grade(low > 0.5, low > 0), f"rank correlation of the distance from the middle and weight {found}"


def _diversity(results: Results) -> Finding:
    rows = results.rows("diversity")
    off = [row for row in rows if abs(row["magnitude"] - row["diversity"]) > 1e-6 * row["diversity"]]
    negative = [row for row in rows if row["negative"]]
    worst = max(rows, key=lambda row: row["magnitude"] / row["diversity"])
    same = {(r["draw"], r["spread"]) for r in off} == {(r["draw"], r["spread"]) for r in negative}
    return grade(not off, len(off) < len(rows)), (
        f"different in {len(off)} of {len(rows)} random sets, "
        + (
            "exactly those with a negative weight"
            if same
            else f"while {len(negative)} have a negative weight"
        )
        + f"; farthest apart: magnitude {worst['magnitude']:.2f}, largest diversity {worst['diversity']:.2f}"
    )


_EXPERIMENTS = (
    (
        "redundancy",
        "Keys in crowds are suppressed.",
        "Random clouds with crowds in two dimensions, interval over draws: holds if the rank correlation of"
        " density and weight is below −0.5; with limits if it is below 0.",
        "The interval reaches 0.",
        _redundancy,
    ),
    (
        "edges",
        "Unique keys and those at the edge are amplified.",
        "The same clouds: holds if the rank correlation of distance from the middle and weight is above"
        " 0.5; with limits if it is above 0.",
        "The interval reaches 0.",
        _edges,
    ),
    (
        "bound",
        "|X| is the maximum diversity of the set.",
        "16 random keys in two dimensions: holds if magnitude equals the largest diversity of any"
        " distribution to a millionth in every set; with limits if in some.",
        "They differ in every set.",
        _diversity,
    ),
)
SECTION = Section(
    name="clouds",
    order=54,
    facts=facts,
    claims=[
        Claim(name, ROSIC, text, EXPERIMENT, rule, no, check, evidence="solver")
        for name, text, rule, no, check in _EXPERIMENTS
    ],
)
