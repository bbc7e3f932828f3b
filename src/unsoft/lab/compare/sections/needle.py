"""Finding one key among many: the advantage in logits that a key needs to get half of the mass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import Candidate, normals
from unsoft.lab.compare.jobs import Job, Results, Rows, matching
from unsoft.lab.compare.section import (
    BASELINE,
    EXPERIMENT,
    FOCUS,
    SU,
    Finding,
    Request,
    ScoreColumn,
    Section,
    claim,
    job,
)
from unsoft.lab.evidence import Estimate, censored_mean, grade
from unsoft.lab.report.figure import Figure, by_mechanism, reference_line

KEYS = 1024
LIMIT = 64.0
ADVANTAGES = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, LIMIT)
SHOWN_UP_TO = 32.0
CURVE = (*(0.5 * k for k in range(33)), 18.0, 20.0, 22.0, 24.0, 28.0, SHOWN_UP_TO)
"""Advantages at which the curve is drawn; nearly all of it happens below 16."""
HALVINGS = 6
DISTANCES = (1, 8, 64, 512)
_FAR = ("softmax", "retention", "decay(0.9)")


def jobs(request: Request) -> list[Job]:
    draws = max(request.level.draws // 2, 2)
    return [job("needle", c, needle, 0.5, draws=draws) for c in request.with_references(BASELINE)]


def facts(request: Request) -> list[Job]:
    return [job("needle far away", None, far, 0.5)]


def needle(candidate: Candidate, draws: int) -> Rows:
    """Measure the needle's share of the mass by its advantage, and the advantage that gives it half.

    The other logits are N(0, 1); the needle has a random position, since some mechanisms depend on it.
    """
    generator = torch.Generator().manual_seed(20)
    others = torch.randn(draws, KEYS, generator=generator, dtype=torch.float64)
    positions = torch.randint(KEYS, (draws,), generator=generator)
    share = partial(shares, candidate.row(), others, positions)
    with torch.no_grad():
        rows: Rows = [
            {"kind": "share", "advantage": x, "share": float(at.mean())}
            for x, at in zip(CURVE, _curve(share, draws, CURVE), strict=True)
        ]
        needed = halfway(_curve(share, draws), share)
    return rows + [{"kind": "needed", "draw": k, "advantage": x} for k, x in enumerate(needed)]


def shares(weigh: Callable[[Tensor], Tensor], others: Tensor, positions: Tensor, advantage: Tensor) -> Tensor:
    """Return the share a / sum |a| of the mass of each row that its needle holds."""
    row = weigh(others.scatter(1, positions[:, None], advantage[:, None]))
    mass = row.abs().sum(-1)
    held = row.gather(1, positions[:, None])[:, 0]
    return torch.where(mass > 0, held / mass.clamp_min(1e-300), 0.0)


def halfway(curve: Tensor, share: Callable[[Tensor], Tensor]) -> list[float | None]:
    """Return the smallest advantage with half of the mass, by bisection; None if there is none."""
    reached = curve >= 0.5
    first = reached.int().argmax(0)
    grid = torch.tensor(ADVANTAGES, dtype=torch.float64)
    high, low = grid[first], grid[(first - 1).clamp_min(0)]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = share(middle) >= 0.5
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
    ever = reached.any(0).tolist()
    return [x if once else None for x, once in zip(high.tolist(), ever, strict=True)]


def far() -> Rows:
    """Measure the advantage that a key needs at some distance from the query, in a row of 1024."""
    rows: Rows = []
    for name, distance in itertools.product(_FAR, DISTANCES):
        others, positions = normals(21)(4, KEYS), torch.full((4,), KEYS - 1 - distance)
        share = partial(shares, Candidate(name, name).row(width=16), others, positions)
        with torch.no_grad():
            needed = halfway(_curve(share, 4), share)
        row = {"mechanism": name, "distance": distance}
        rows += [row | {"draw": draw, "advantage": x} for draw, x in enumerate(needed)]
    return rows


def _curve(share: Callable[[Tensor], Tensor], draws: int, advantages: Sequence[float] = ADVANTAGES) -> Tensor:
    """Return the shares (advantages, draws) at every advantage."""
    return torch.stack([share(torch.full((draws,), x, dtype=torch.float64)) for x in advantages])


def figures(results: Results) -> Iterator[Figure]:
    rows = results.each("needle", kind="share")
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
        ) + reference_line(0.5, "half")
        note = (
            "How far above the others a logit must be before its key gets half of the attention, the dotted"
            " line."
        )
        yield Figure("needle", f"One key among {KEYS}", note, rows, chart)


def advantages_of(results: Results, label: str) -> list[float | None]:
    """Return the advantage needed in each draw."""
    return [row["advantage"] for row in results.get("needle", label, kind="needed")]


def needed(results: Results, label: str) -> Estimate | None:
    """Return the mean advantage needed, a lower bound if some draws never get there."""
    advantages = advantages_of(results, label)
    return censored_mean(advantages, LIMIT) if advantages else None


@claim(SU, EXPERIMENT, "Decay makes attention sparse, but fixed: it cannot look far when it should.")
def _decay_far(results: Results) -> Finding:
    """Four rows of 1024 keys: supported if a key 512 tokens back never gets half of the mass under decay and
    retention for any advantage up to 64, while it does under softmax in every row; partly if that is so
    for one of the two.

    Refuted: Both give the far key half of the mass at some advantage, or softmax does not.
    """
    rows = results.rows("needle far away")
    farthest = max(row["distance"] for row in rows)
    never = {
        name: [row["advantage"] is None for row in matching(rows, mechanism=name, distance=farthest)]
        for name in _FAR
    }
    near = [row["advantage"] for row in matching(rows, mechanism="retention", distance=1)]
    blind = [all(never[name]) for name in _FAR[1:]]
    seen = not any(never["softmax"])
    counts = [
        f"{name} {'never' if all(x) else f'in {len(x) - sum(x)} of {len(x)} rows'}"
        for name, x in never.items()
    ]
    next_to = "never" if None in near else f"with {sum(near) / len(near):.1f}"
    return grade(all(blind) and seen, any(blind) and seen), (
        f"half of the mass for a key {farthest} tokens back, with an advantage of up to {LIMIT:g}:"
        f" {', '.join(counts)}; retention gets there {next_to} for the key next to the query"
    )


_SOFTMAX = math.log(KEYS - 1) + 0.5
SECTION = Section(
    name="needle",
    order=12,
    group=FOCUS,
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
            "needle",
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
            need=f"find one key among {KEYS}",
            draws=advantages_of,
            margin=0.1,
        )
    ],
    claims=[_decay_far],
)
