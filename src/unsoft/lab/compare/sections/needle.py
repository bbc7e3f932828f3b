"""Finding one key among many: the advantage in logits that a key needs to get half of the mass.

How far above the others must a logit be so that its key gets half of the attention? This grows like log n for
exponential weights, and like a power of n for all others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import Candidate, normals
from unsoft.lab.compare.jobs import Results, RowIterator, Rows, matching
from unsoft.lab.compare.section import BASELINE, FOCUS, SU, Finding, Section
from unsoft.lab.evidence import grade

KEYS = 1024
LIMIT = 64.0
ADVANTAGES = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, LIMIT)
CURVE = (*(0.5 * k for k in range(33)), 18.0, 20.0, 22.0, 24.0, 28.0, 32.0)
"""Advantages at which the curve is drawn; nearly all of it happens below 16."""
HALVINGS = 6
DISTANCES = (1, 8, 64, 512)
_FAR = ("softmax", "retention", "decay(0.9)")


SECTION = Section(order=12, group=FOCUS, question="Can it find one key among many?", about=__doc__)


@SECTION.each(0.5, BASELINE, draws=lambda level: max(level.draws // 2, 2))
def needle(candidate: Candidate, draws: int) -> RowIterator:
    """Measure the needle's share of the mass by its advantage, and the advantage that gives it half.

    The other logits are N(0, 1); the needle has a random position, since some mechanisms depend on it.
    """
    generator = torch.Generator().manual_seed(20)
    others = torch.randn(draws, KEYS, generator=generator, dtype=torch.float64)
    positions = torch.randint(KEYS, (draws,), generator=generator)
    share = partial(shares, candidate.row(), others, positions)
    for x, at in zip(CURVE, _curve(share, draws, CURVE), strict=True):
        yield {"kind": "share", "advantage": x, "share": float(at.mean())}
    for draw, needed in enumerate(halfway(_curve(share, draws), share)):
        yield {"kind": "needed", "draw": draw, "advantage": needed}


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


@SECTION.fact(0.5, name="needle far away")
def far() -> RowIterator:
    """Measure the advantage that a key needs at some distance from the query, in a row of 1024."""
    for name, distance in itertools.product(_FAR, DISTANCES):
        others, positions = normals(21)(4, KEYS), torch.full((4,), KEYS - 1 - distance)
        share = partial(shares, Candidate(name, name).row(width=16), others, positions)
        for draw, x in enumerate(halfway(_curve(share, 4), share)):
            yield {"mechanism": name, "distance": distance, "draw": draw, "advantage": x}


def _curve(share: Callable[[Tensor], Tensor], draws: int, advantages: Sequence[float] = ADVANTAGES) -> Tensor:
    """Return the shares (advantages, draws) at every advantage."""
    return torch.stack([share(torch.full((draws,), x, dtype=torch.float64)) for x in advantages])


@SECTION.lines(
    "needle",
    f"One key among {KEYS}",
    x=("advantage", f"logit of the needle, {KEYS - 1} others are N(0, 1)"),
    y=("share", "share of the mass"),
    dots=[],
    y_domain=[0, 1],
    reference=(0.5, "half"),
)
def _shares(results: Results) -> Rows:
    """How far above the others a logit must be before its key gets half of the attention, the dotted line."""
    return results.each("needle", kind="share")


@SECTION.column(
    "needle",
    "needle",
    yes=8.0,
    partly=LIMIT - 1e-9,
    low_is_good=True,
    limit=LIMIT,
    margin=0.1,
    unit="logits",
    need=f"find one key among {KEYS}",
)
def _needed(results: Results, label: str) -> list[float | None]:
    """Advantage in logits that one key needs to get half of the mass among 1024.

    Yes up to 8, the logit of a key that points exactly where the query points, with 64 coordinates of
    variance 1 (softmax needs 7.43 by theory); partly if 64, eight times that, is enough; no if it is not. An
    output of zeros and random weights never get there.
    """
    return [row["advantage"] for row in results.get("needle", label, kind="needed")]


@SECTION.experiment(SU, "Decay makes attention sparse, but fixed: it cannot look far when it should.")
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
