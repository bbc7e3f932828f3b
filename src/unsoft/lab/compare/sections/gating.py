"""The gate of magnitude, at initialisation and fitted so that crowds count as one, in both forms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from unsoft.lab.compare.jobs import Job, Results, Rows
from unsoft.lab.compare.section import EXPERIMENT, ROSIC, Finding, Request, Section, claim, job
from unsoft.lab.compare.sections.hijack import (
    CROWD,
    FITTED_TO,
    Gate,
    GatedCandidate,
    fitted_gate,
    from_one,
    weights_of,
)
from unsoft.lab.evidence import grade
from unsoft.lab.report.comparison import Part

_FORMS = ("values", "mass")


def facts(request: Request) -> list[Job]:
    return [job("gates", None, gates, 0.5)]


def gates() -> Rows:
    """Measure what crowds count as under magnitude in both forms, initial and fitted."""
    rows = []
    gates = {"start": Gate(1.0, 0.0, 1.0), "fitted": fitted_gate()}
    for (kind, gate), where, crowd in itertools.product(gates.items(), _FORMS, (CROWD, 1000)):
        candidate = GatedCandidate("magnitude", "magnitude", gate=gate, where=where)
        row, alone = weights_of(candidate, crowd), weights_of(candidate, 1)
        odds = [float(x[1:].sum() / x[0]) for x in (row, alone)]
        rows.append(
            {
                "gate": kind,
                "where": where,
                "beta": gate.beta,
                "gamma": gate.gamma,
                "t": gate.t,
                "clones": crowd,
                "count": odds[0] / odds[1],
                "unique": float(row[0]),
                "clone_gate": gate.of(1 / (crowd + gate.eps)),
                "unique_gate": gate.of(1 / (1 + gate.eps)),
            }
        )
    return rows


def parts(results: Results) -> Iterator[Part]:
    rows = results.get("gates")
    if rows:
        titles = {"gate": "gate", "where": "on", "beta": "β", "gamma": "γ", "t": "t", "clones": "clones"}
        titles |= {
            "count": "counts as",
            "unique": "weight of the unique key",
            "clone_gate": "gate of a clone",
        }
        columns = [{"name": name, "title": title, "help": ""} for name, title in titles.items()]
        text = f"As it starts, and with β, γ and t fitted so that crowds of 2 to {FITTED_TO} count as one."
        yield Part("The gate of magnitude, in both forms", text, columns, rows)


def _row(results: Results, gate: str, where: str, clones: int) -> dict[str, Any]:
    row: dict[str, Any] = results.rows("gates", gate=gate, where=where, clones=clones)[0]
    return row


@claim(
    ROSIC,
    EXPERIMENT,
    "The magnitude gate keeps clones from taking over.",
    refuted="Even 50 clones count as more than 2, or less than half.",
    rule=(
        f"Gate on the mass, β, γ and t fitted to crowds of 2 to {FITTED_TO}: supported if {CROWD} and 1000"
        " clones both count as one within a factor of 2; partly if 50 do."
    ),
)
def _gate(results: Results) -> Finding:
    start, fitted, beyond = (
        _row(results, *at)["count"]
        for at in (("start", "mass", CROWD), ("fitted", "mass", CROWD), ("fitted", "mass", 1000))
    )
    kept = [from_one(x) <= 2 for x in (fitted, beyond)]
    return grade(all(kept), kept[0]), (
        f"{CROWD} clones count as {start:.1f} at the gate's start and as {fitted:.2f} once β and γ are fitted"
        f" to crowds of up to {FITTED_TO}; 1000 clones then count as {beyond:.2f}"
    )


@claim(
    ROSIC,
    EXPERIMENT,
    "A gated cluster of 50 clones counts as one unit of information.",
    refuted="They count as more than 2, or less than half.",
)
def _one_unit(results: Results) -> Finding:
    """Gate on values, fitted: supported if 50 clones count as one within 10 %; partly if within a factor
    of 2.
    """
    row = _row(results, "fitted", "values", CROWD)
    start = _row(results, "start", "values", CROWD)
    return grade(from_one(row["count"]) < 1.1, from_one(row["count"]) < 2), (
        f"{CROWD} clones count as {row['count']:.2f} with the fitted gate (β = {row['beta']:.3g}, γ ="
        f" {row['gamma']:.3g}, t = {row['t']:.3g}), as {start['count']:.1f} at the start"
    )


@claim(ROSIC, EXPERIMENT, "Redundant tokens shrink to near 0.", refuted="It is above 0.05 in both.")
def _gates_shrink(results: Results) -> Finding:
    """The gate of one of 50 clones: supported if it is below 0.05 at the start and when fitted; partly
    if in one of the two.
    """
    start, fitted = (_row(results, kind, "values", CROWD) for kind in ("start", "fitted"))
    near = [row["clone_gate"] < 0.05 for row in (start, fitted)]
    return grade(all(near), any(near)), (
        f"the gate of one of {CROWD} clones is {start['clone_gate']:.3f} at the start and"
        f" {fitted['clone_gate']:.3f} when fitted; that of a"
        f" unique key {start['unique_gate']:.3f} and {fitted['unique_gate']:.3f}"
    )


@claim(
    ROSIC,
    EXPERIMENT,
    "A gate on the values is better than one that only changes scores.",
    refuted="It is more than 5 % smaller.",
)
def _values_or_mass(results: Results) -> Finding:
    """Weight of the unique key in the output against 50 clones, fitted gate: supported if it is 5 % larger
    with the gate on values than with the gate on the mass; partly if within 5 %.
    """
    values, mass = (_row(results, "fitted", where, CROWD)["unique"] for where in _FORMS)
    return grade(values > 1.05 * mass, values > 0.95 * mass), (
        f"weight with which the unique key reaches the output, fitted gate, {CROWD} clones: {values:.3f} with"
        f" the gate on values, {mass:.3f} with the gate on the mass"
    )


SECTION = Section(
    name="gating",
    order=22,
    title="Gates",
    question="What does the gate of magnitude do?",
    facts=facts,
    parts=parts,
    claims=[_gate, _one_unit, _gates_shrink, _values_or_mass],
)
