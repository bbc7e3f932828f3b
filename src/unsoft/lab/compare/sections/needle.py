"""Can it find one key among many? The advantage in logits that a key needs to get half of the mass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Job, Results, Rows
from unsoft.lab.compare.section import EXPERIMENT, SU, Finding, Request, ScoreColumn, Section, claim, job
from unsoft.lab.evidence import Estimate, grade, t_interval
from unsoft.lab.report.figure import Figure, by_mechanism

KEYS = 1024
LIMIT = 64.0
ADVANTAGES = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, LIMIT)
HALVINGS = 6
DISTANCES = (1, 8, 64, 512)
_FAR = ("softmax", "retention", "decay(0.9)")


def jobs(request: Request) -> list[Job]:
    draws = max(request.level.draws // 2, 2)
    return [job("needle", c, needle, 0.3, draws=draws) for c in request.candidates]


def facts(request: Request) -> list[Job]:
    return [job("needle far away", None, far, 0.5)]


def needle(candidate: Candidate, draws: int) -> Rows:
    """The needle's share of the mass at each advantage, and the advantage that gives it half, for each
    draw.

    The other logits are N(0, 1); the needle stands at a random place, since some mechanisms look at places.
    """
    generator = torch.Generator().manual_seed(20)
    others = torch.randn(draws, KEYS, generator=generator, dtype=torch.float64)
    places = torch.randint(KEYS, (draws,), generator=generator)
    share = partial(shares, candidate.row(), others, places)
    with torch.no_grad():
        curve = torch.stack([share(torch.full((draws,), x, dtype=torch.float64)) for x in ADVANTAGES])
        rows: Rows = [
            {"kind": "share", "advantage": x, "share": float(at.mean())}
            for x, at in zip(ADVANTAGES, curve, strict=True)
        ]
        needed = halfway(curve, share)
    return rows + [{"kind": "needed", "draw": k, "advantage": x} for k, x in enumerate(needed)]


def shares(weigh: Callable[[Tensor], Tensor], others: Tensor, places: Tensor, advantage: Tensor) -> Tensor:
    """What of the mass of each row its needle holds, with a positive weight: a / sum |a|."""
    row = weigh(others.scatter(1, places[:, None], advantage[:, None]))
    mass = row.abs().sum(-1)
    held = row.gather(1, places[:, None])[:, 0]
    return torch.where(mass > 0, held / mass.clamp_min(1e-300), 0.0)


def halfway(curve: Tensor, share: Callable[[Tensor], Tensor]) -> list[float | None]:
    """The smallest advantage with half of the mass, between the points of the curve by halving; None:
    never.
    """
    reached = curve >= 0.5
    first = reached.int().argmax(0)
    grid = torch.tensor(ADVANTAGES, dtype=torch.float64)
    high, low = grid[first], grid[(first - 1).clamp_min(0)]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = share(middle) >= 0.5
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
    return [x if found else None for x, found in zip(high.tolist(), reached.any(0).tolist(), strict=True)]


def far() -> Rows:
    """The advantage that a key needs at some distance from the query, in a row of 1024."""
    rows = []
    for name in _FAR:
        for distance in DISTANCES:
            generator = torch.Generator().manual_seed(21)
            others = torch.randn(4, KEYS, generator=generator, dtype=torch.float64)
            places = torch.full((4,), KEYS - 1 - distance)
            share = partial(shares, Candidate(name, name).row(width=16), others, places)
            with torch.no_grad():
                grid = [share(torch.full((4,), x, dtype=torch.float64)) for x in ADVANTAGES]
                needed = halfway(torch.stack(grid), share)
            for draw, x in enumerate(needed):
                rows.append({"mechanism": name, "distance": distance, "draw": draw, "advantage": x})
    return rows


def figures(results: Results) -> Iterator[Figure]:
    rows = [row for row in results.each("needle") if row["kind"] == "share"]
    if rows:
        chart = by_mechanism(
            results.labels,
            rows,
            "advantage",
            "share",
            x_title=f"logit of the needle, {KEYS - 1} others are N(0, 1)",
            y_title="share of the mass",
            dots=[],
            y_domain=[0, 1],
        )
        note = (
            "How far above the others a logit must be before its key matters. Half of the mass is the mark."
        )
        yield Figure("needle", f"One key among {KEYS}", note, rows, chart)


def needed(results: Results, label: str) -> Estimate | None:
    """With draws in which it never gets there counted as the limit."""
    found = [row["advantage"] for row in results.get("needle", label) if row["kind"] == "needed"]
    return t_interval([LIMIT if x is None else x for x in found]) if found else None


@claim(
    SU,
    EXPERIMENT,
    "Decay makes attention sparse, but fixed: it cannot look far when it should.",
    refuted="Retention or decay gives a far key half of the mass at some advantage.",
    rule=(
        f"Four rows of {KEYS} keys: holds if a key {DISTANCES[-1]} tokens back never gets half of the"
        f" mass under decay and retention for any advantage up to {LIMIT:g}, while it does under softmax"
        " in every row; with limits if that is so for one of the two."
    ),
)
def _decay_far(results: Results) -> Finding:
    rows = results.rows("needle far away")
    farthest = max(row["distance"] for row in rows)
    never = {
        name: [
            row["advantage"] is None
            for row in rows
            if row["mechanism"] == name and row["distance"] == farthest
        ]
        for name in _FAR
    }
    near = [r["advantage"] for r in rows if r["mechanism"] == "retention" and r["distance"] == 1]
    blind = [all(never[name]) for name in _FAR[1:]]
    seen = not any(never["softmax"])
    words = [
        f"{name} {'never' if all(x) else f'in {len(x) - sum(x)} of {len(x)} rows'}"
        for name, x in never.items()
    ]
    next_to = "never" if None in near else f"with {sum(near) / len(near):.1f}"
    return grade(all(blind) and seen, any(blind) and seen), (
        f"half of the mass for a key {farthest} tokens back, with an advantage of up to {LIMIT:g}:"
        f" {', '.join(words)}; retention gets there {next_to} for the key next to the query"
    )


_SOFTMAX = math.log(KEYS - 1) + 0.5
SECTION = Section(
    name="needle",
    order=12,
    title="Needle",
    question="Can it find one key among many?",
    about=(
        "Half of the mass of a row needs an advantage that grows like log n if weights are exponential, and"
        " like a power of n if they are not."
    ),
    jobs=jobs,
    facts=facts,
    figures=figures,
    columns=[
        ScoreColumn(
            "needle",
            "finds a needle?",
            f"advantage in logits that one key needs to get half of the mass among {KEYS}",
            needed,
            8.0,
            LIMIT - 1e-9,
            low_is_good=True,
            unit="logits",
            why=(
                "yes up to 8, the logit of a key that points exactly where the query points, with 64"
                f" coordinates of variance 1 (softmax needs {_SOFTMAX:.2f} by theory); partly if {LIMIT:g},"
                " eight times that, is enough; no if it is not. An output of zeros and random weights never"
                " get there."
            ),
            limit=LIMIT,
        )
    ],
    claims=[_decay_far],
)
