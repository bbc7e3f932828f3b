"""Is it hijacked? What a unique key keeps as clones of another become more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from unsoft import theory
from unsoft.compare.jobs import Job, Results
from unsoft.compare.level import Level
from unsoft.compare.section import CLAIMS, ROSIC, Claim, Column, Finding, Request, Section, grade, job
from unsoft.compare.subject import WIDTH, Subject
from unsoft.formula import Formula
from unsoft.magnitude import weighting
from unsoft.report.figure import Figure, by_mechanism, grey_dots

CLONES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
UNIQUE, CLONE = 1 + math.log(20), 1.0
"""Logits: exp says that the unique key is 20 times as relevant.

Logit 0 would be nothing to many signed mechanisms.
"""
FAR = 40.0


def jobs(request: Request) -> list[Job]:
    return [job("hijack", s, partial(hijack, s), 0.1) for s in request.everyone]


def facts(level: Level) -> list[Job]:
    return [job("units", None, units, 0.1), job("example", None, example, 0.1)]


def hijack(subject: Subject) -> list[dict[str, Any]]:
    rows = [
        {"kind": "measured", "clones": count, "share": measured_share(subject, count)} for count in CLONES
    ]
    return rows + [
        {"kind": "theory", "clones": count, "share": share}
        for count, share in zip(CLONES, _theory(subject), strict=False)
    ]


def measured_share(subject: Subject, clones: int, **options: float) -> float:
    """|a_unique| / sum |a| of a row over one key and ``clones`` equal ones, far away from it."""
    unique, clone = options.get("unique", UNIQUE), options.get("clone", CLONE)
    width = WIDTH
    query = torch.zeros(1, 1, width, dtype=torch.float64)
    query[..., 0] = math.sqrt(width)
    key = torch.zeros(1, clones + 1, width, dtype=torch.float64)
    key[:, :, 0] = clone
    key[:, 0, 0] = unique
    key[:, :, 1] = FAR
    key[:, 0, 1] = -FAR
    with torch.no_grad():
        row = subject.weights(query, key)[0, 0].abs()
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


def units() -> list[dict[str, Any]]:
    """What 50 clones contribute to the output, in units of one of them:
    gate passed on as it is, and through the sigmoid.
    """
    clones = torch.zeros(50, WIDTH, dtype=torch.float64)
    weights = weighting(
        torch.cat([clones, clones[:1] + 40]), eps=1e-9, solver="cholesky", throw=False
    ).weights[:50]
    rows = [{"gate": "weight", "slope": None, "offset": None, "units": float(weights.sum())}]
    for slope, offset in ((1.0, 0.0), (4.0, -2.0), (10.0, -5.0)):
        gates = torch.sigmoid(slope * weights + offset)
        alone = torch.sigmoid(torch.tensor(slope + offset, dtype=torch.float64))
        rows.append(
            {"gate": "sigmoid", "slope": slope, "offset": offset, "units": float(gates.sum() / alone)}
        )
    return rows


def example() -> list[dict[str, Any]]:
    """The example of Rosić 2026 on real attention weights: relevance 20 against 50 keys of relevance 1."""
    softmax = Subject("softmax", "softmax")
    rows = [
        {
            "mechanism": "softmax",
            "clones": 50,
            "share": measured_share(softmax, 50, unique=math.log(20), clone=0.0),
        }
    ]
    plain = Formula("exp(s - m)", "exp(s - m)", "s")
    rows.append(
        {
            "mechanism": "exp by its formula",
            "clones": 50,
            "share": float(plain.row(torch.tensor([math.log(20)] + [0.0] * 50, dtype=torch.float64))[0]),
        }
    )
    return rows


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
    counts = sorted({row["clones"] for row in dots})
    shares = theory.magnitude_hijack(counts, gate="weight", eps=0.1).share.tolist()
    ideal = [{"clones": m, "share": share} for m, share in zip(counts, shares, strict=True)]
    line = grey_dots(ideal, "clones", "share")
    note = (
        "A key of relevance 20 against clones of relevance 1. Lines: theory where there is one; dots:"
        " measured. Grey dots: a gate that"
        " passes the magnitude weight itself, as Rosić 2026 computes the example; the sigmoid gate defined"
        " there only delays the hijack."
    )
    yield Figure("hijack", "Share of the unique key", note, rows, chart + line)


def _share_at_50(results: Results, label: str) -> float | None:
    rows = results.get("hijack", label)
    return next((row["share"] for row in rows if row["kind"] == "measured" and row["clones"] == 50), None)


def _example(results: Results) -> Finding:
    share = results.rows("example")[0]["share"]
    return grade(abs(share - 20 / 70) < 1e-6), f"measured {share:.4f} and {1 - share:.4f}"


def _hijacked(results: Results) -> Finding:
    rows = {
        row["clones"]: row["share"] for row in results.rows("hijack", "softmax") if row["kind"] == "measured"
    }
    return grade(rows[1] > 0.9 and rows[1000] < 0.05), (
        f"a key 20 times as relevant keeps {rows[1]:.3f} against 1 clone, {rows[50]:.3f} against 50,"
        f" {rows[1000]:.3f} against 1000"
    )


def _gate(results: Results) -> Finding:
    softmax, gated = (
        {row["clones"]: row["share"] for row in results.rows("hijack", name) if row["kind"] == "measured"}
        for name in ("softmax", "magnitude")
    )
    stops, delays = gated[1000] > 0.5 * gated[1], gated[50] > 1.1 * softmax[50]
    why = (
        "at its start the sigmoid only delays the hijack, since it tends to a constant"
        if delays
        else "no help at its start"
    )
    return grade(stops, delays), (
        f"against 50 clones {gated[50]:.3f} instead of {softmax[50]:.3f}, against 1000 {gated[1000]:.3f}"
        " instead of"
        f" {softmax[1000]:.3f}" + ("" if stops else f": {why}")
    )


def _one_unit(results: Results) -> Finding:
    rows = results.rows("units")
    weight = next(row["units"] for row in rows if row["gate"] == "weight")
    sigmoid = next(row["units"] for row in rows if row["gate"] == "sigmoid")
    sharp = rows[-1]
    return grade(abs(sigmoid - 1) < 0.1, abs(weight - 1) < 0.01), (
        f"50 clones count as {weight:.2f} if the gate passes the weight itself, as {sigmoid:.1f} through"
        f" sigmoid(μ), as {sharp['units']:.2f} "
        f"through sigmoid({sharp['slope']:g}μ {sharp['offset']:+g})"
    )


_HIJACK, _FACTS = "softmax magnitude --only hijack", f"--only {CLAIMS}"
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
            "resists clones?",
            (
                "share that a key of relevance 20 keeps against 50 clones of relevance 1; one clone leaves it"
                " 0.95 under softmax"
            ),
            _share_at_50,
            0.8,
            0.33,
        )
    ],
    claims=[
        Claim(
            "example",
            ROSIC,
            "Relevance 20 against 50 keys of relevance 1 leaves 0.286 and 0.714.",
            _FACTS,
            _example,
        ),
        Claim(
            "hijacking",
            ROSIC,
            "Under softmax many mediocre copies drown one relevant key.",
            _HIJACK,
            _hijacked,
        ),
        Claim("gate", ROSIC, "The magnitude gate keeps clones from taking over.", _HIJACK, _gate),
        Claim(
            "one-unit",
            ROSIC,
            "A gated cluster of clones counts as one unit of information.",
            _FACTS,
            _one_unit,
        ),
    ],
)
