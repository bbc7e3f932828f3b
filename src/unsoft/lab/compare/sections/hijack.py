"""Is it hijacked? What clones of a mediocre key count as, and what a unique key keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from unsoft import theory
from unsoft.lab.compare.claim import DEFINITION, ROSIC, THEOREM, Claim, Finding
from unsoft.lab.compare.column import Column
from unsoft.lab.compare.gate import GatedSubject, fitted_gate
from unsoft.lab.compare.jobs import Job, Results
from unsoft.lab.compare.level import Level
from unsoft.lab.compare.section import Request, Section, job
from unsoft.lab.compare.subject import WIDTH, Subject
from unsoft.lab.evidence import grade
from unsoft.lab.report.figure import Figure, by_mechanism, grey_dots

CLONES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
UNIQUE, CLONE = 1 + math.log(20), 1.0
"""Logits: exp says that the unique key is 20 times as relevant.

Logit 0 would be nothing to many signed mechanisms.
"""
FAR, CROWD = 40.0, 50


def jobs(request: Request) -> list[Job]:
    return [job("hijack", s, partial(hijack, s), 0.1) for s in request.everyone]


def facts(level: Level) -> list[Job]:
    return [job("example", None, example, 0.1)]


def hijack(subject: Subject) -> list[dict[str, Any]]:
    """Shares as the mechanism starts; of magnitude also with the gate fitted to crowds of up to 50."""
    rows = [
        {"kind": "measured", "clones": count, "share": measured_share(subject, count)} for count in CLONES
    ]
    if _has_gate(subject):
        fitted = GatedSubject(subject.label, subject.mechanism, gate=fitted_gate())
        rows += [{"kind": "fitted", "clones": m, "share": measured_share(fitted, m)} for m in CLONES]
    return rows + [
        {"kind": "theory", "clones": count, "share": share}
        for count, share in zip(CLONES, _theory(subject), strict=False)
    ]


def _has_gate(subject: Subject) -> bool:
    if subject.formula is not None:
        return False
    gate = fitted_gate()
    return subject.module(2).set_key_gate(beta=gate.beta, gamma=gate.gamma, t=gate.t)


def weights_of(subject: Subject, clones: int, unique: float = UNIQUE, clone: float = CLONE) -> torch.Tensor:
    """|a| of a row over one key, first, and ``clones`` equal ones, far away from it."""
    query = torch.zeros(1, 1, WIDTH, dtype=torch.float64)
    query[..., 0] = math.sqrt(WIDTH)
    key = torch.zeros(1, clones + 1, WIDTH, dtype=torch.float64)
    key[:, :, 0] = clone
    key[:, 0, 0] = unique
    key[:, :, 1] = FAR
    key[:, 0, 1] = -FAR
    with torch.no_grad():
        return subject.weights(query, key)[0, 0].abs()


def measured_share(subject: Subject, clones: int, unique: float = UNIQUE, clone: float = CLONE) -> float:
    """|a_unique| / sum |a|."""
    row = weights_of(subject, clones, unique, clone)
    total = float(row.sum())
    return float(row[0]) / total if total else 0.0


def _theory(subject: Subject) -> list[float]:
    """The shares that theory expects, as far as there is a theory of the mechanism."""
    try:
        if subject.formula is None:
            gates = subject.module(max(CLONES) + 1).clone_theory
            if gates is None:
                return []
            return theory.magnitude_hijack(CLONES, unique=UNIQUE, clone=CLONE, **gates).share.tolist()
        if subject.formula.uses & {"i", "j"}:
            return []
        return theory.hijack_share(subject.formula, CLONES, unique=UNIQUE, clone=CLONE).tolist()
    except ValueError:
        return []


def example() -> list[dict[str, Any]]:
    """The example of Rosić 2026 on real attention weights: relevance 20 against 50 keys of relevance 1."""
    share = measured_share(Subject("softmax", "softmax"), CROWD, unique=math.log(20), clone=0.0)
    return [{"mechanism": "softmax", "clones": CROWD, "share": share}]


def figures(results: Results) -> Iterator[Figure]:
    rows = results.each("hijack")
    if not rows:
        return
    dots = [row for row in rows if row["kind"] == "measured"]
    lines = [row for row in rows if row["kind"] == "theory"]
    have = {row["mechanism"] for row in lines}
    lines += [row for row in dots if row["mechanism"] not in have]  # no theory: the measured points, joined
    chart = by_mechanism(
        results.labels,
        lines,
        "clones",
        "share",
        x_title="clones",
        y_title="share of the unique key",
        dots=dots,
        log_x=True,
        y_domain=[0, 1],
    )
    shares = theory.magnitude_hijack(list(CLONES), gate="weight", eps=0.1).share.tolist()
    ideal = [{"clones": m, "share": share} for m, share in zip(CLONES, shares, strict=True)]
    note = (
        "A key of relevance 20 against clones of relevance 1, as each mechanism starts. Lines: theory where"
        " there is one; dots: measured."
        " Grey dots: a gate that passes the magnitude weight itself."
    )
    yield Figure("hijack", "Share of the unique key", note, rows, chart + grey_dots(ideal, "clones", "share"))


def effective_count(results: Results, label: str) -> float | None:
    """What 50 clones count as, in clones: odds(50) / odds(1). Of magnitude with its fitted gate; without
    any weight: the limit.
    """
    rows = results.get("hijack", label)
    kind = "fitted" if any(row["kind"] == "fitted" for row in rows) else "measured"
    share = {row["clones"]: row["share"] for row in rows if row["kind"] == kind}
    if not share:
        return None
    if not 0 < share[1] < 1 or not share[CROWD] > 0:
        return float(CROWD)
    return float(min((1 / share[CROWD] - 1) / (1 / share[1] - 1), CROWD))


def from_one(count: float) -> float:
    """How many times more or less than one."""
    return math.inf if count <= 0 else max(count, 1 / count)


def _example(results: Results) -> Finding:
    share = results.rows("example")[0]["share"]
    return grade(abs(share - 20 / 70) < 1e-6), f"measured {share:.4f} and {1 - share:.4f}"


def _hijacked(results: Results) -> Finding:
    rows = {r["clones"]: r["share"] for r in results.rows("hijack", "softmax") if r["kind"] == "measured"}
    return grade(rows[1] > 0.9 and rows[1000] < 0.05), (
        f"a key 20 times as relevant keeps {rows[1]:.3f} against 1 clone, {rows[50]:.3f} against 50,"
        f" {rows[1000]:.3f} against 1000"
    )


def _wasted(results: Results) -> Finding:
    rows = {r["clones"]: r["share"] for r in results.rows("hijack", "softmax") if r["kind"] == "measured"}
    copies = (1 - rows[CROWD]) * (CROWD - 1) / CROWD
    return grade(copies > 0.5), f"{copies:.1%} of softmax's mass goes to copies of a key that it already has"


SECTION = Section(
    name="hijack",
    order=20,
    title="Hijack",
    question="Is it hijacked?",
    about="One relevant key, and more and more copies of a mediocre one.",
    jobs=jobs,
    facts=facts,
    figures=figures,
    columns=[
        Column(
            "clones",
            f"what {CROWD} clones count as",
            f"odds of {CROWD} clones against a unique key over the odds of one: 1 counts as one, {CROWD} is"
            f" hijacked, below 1 the crowd is erased;"
            " magnitude with its gate fitted",
            effective_count,
            CROWD**0.25,
            CROWD**0.5,
            low_is_good=True,
            unit="clones",
            why=(
                f"1 is the aim, {CROWD} what softmax does, and what an output of zeros and random weights"
                f" are given. On a logarithmic scale: yes"
                " within a quarter of the way from 1, partly within half of it, in either direction."
            ),
            limit=float(CROWD),
            badness=from_one,
        )
    ],
    claims=[
        Claim(
            "example",
            ROSIC,
            "Relevance 20 against 50 keys of relevance 1 leaves 0.286 and 0.714.",
            THEOREM,
            "20/70 to 1e-6.",
            check=_example,
        ),
        Claim(
            "hijacking",
            ROSIC,
            "Under softmax many mediocre copies drown one relevant key.",
            DEFINITION,
            "The share of the unique key is above 0.9 against one clone and below 0.05 against 1000.",
            check=_hijacked,
        ),
        Claim(
            "wasted-capacity",
            ROSIC,
            "Attention is wasted on the same feature fifty times.",
            DEFINITION,
            "More than half of softmax's mass lies on copies of a key, beyond the first.",
            check=_wasted,
        ),
    ],
)
