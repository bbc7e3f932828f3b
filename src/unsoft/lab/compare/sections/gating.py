"""Clone counts under magnitude and density: initial, fitted, causal, and with rotary keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unsoft.lab.compare.candidate import WIDTH, Candidate, normals
from unsoft.lab.compare.jobs import Results, RowIterator, Rows, mean_of
from unsoft.lab.compare.section import FOCUS, ROSIC, Finding, Section
from unsoft.lab.compare.sections import hijack
from unsoft.lab.compare.sections.hijack import CROWD, Gate, GatedCandidate, fitted_gate, from_one
from unsoft.lab.evidence import Estimate, grade

START, FITTED, CAUSAL, ROTARY, ROTATED = CASES = (
    "at initialisation",
    "fitted",
    "fitted, causal",
    "fitted, rotary model",
    "fitted, rotated keys",
)
"""The first two are bidirectional, the others causal. A swapped rotary model compares keys before rotation
(:mod:`unsoft.hf.rotary`); the last case compares rotated keys."""
MECHANISMS = ("softmax", "magnitude", "density")
BASES, DRAWS = (1e4, 1e5), 12
"""Bases of rotary positions: those of Llama and of SmolLM2."""
MANY, COUNTED_MANY = 1000, CASES[:4]
"""A far larger crowd, and the cases in which it is counted."""
_FORMS = ("values", "mass")
_ALONE, _EQUAL, _RELEVANT = "alone", "with an equally relevant key", "with a key 20 times as relevant"
_LOGITS = {_ALONE: hijack.CLONE - 40, _EQUAL: hijack.CLONE, _RELEVANT: hijack.UNIQUE}
"""Logits of the unique key: the first leaves it a weight of about e^-40."""


_ASKED = "What do the factors of magnitude and density do?"
SECTION = Section(order=22, group=FOCUS, about_mechanisms=("magnitude",), title="Gates", question=_ASKED)


@SECTION.fact(1.0)
def gates() -> RowIterator:
    """Measure what clones count as in each case, and the mean factor of a clone."""
    sizes = [(case, CROWD) for case in CASES] + [(case, MANY) for case in COUNTED_MANY]
    for name, (case, clones) in itertools.product(MECHANISMS, sizes):
        causal, rotary = case in (CAUSAL, ROTARY, ROTATED), case in (ROTARY, ROTATED)
        gate = Gate(1.0, 0.0, 1.0) if case == START else fitted_gate(causal=causal)
        candidate = Candidate(name, name) if case == START else GatedCandidate(name, name, gate=gate)
        bases = BASES * (DRAWS if case == ROTATED else 1) if rotary else (None,)
        for draw, base in enumerate(bases):
            options: Any = {"causal": causal, "base": base, "draw": draw, "rotated": case == ROTATED}
            crowd, alone = (factors(candidate, m, **options) for m in (clones, 1))
            count = float(crowd[1:].sum() / crowd[0]) / float(alone[1:].sum() / alone[0])
            row = {"under": name, "case": case, "clones": clones, "base": base, "draw": draw}
            row |= {"count": count, "clone_gate": float(crowd[1:].mean()), "unique_gate": float(crowd[0])}
            yield row | {"beta": gate.beta, "gamma": gate.gamma, "t": gate.t}


def factors(
    candidate: Candidate, clones: int, *, causal: bool, base: float | None, draw: int, rotated: bool = True
) -> Tensor:
    """Return the factors of a unique key, first, and of clones of a random one, as the last token sees them.

    The mechanism gets queries of 0, whose even weights show the factors alone. With a ``base`` every key is
    rotated by its position, as in models with rotary positions; ``rotated``: distances are those of the
    rotated keys, otherwise of the keys before.
    """
    clone = normals(1700 + draw)(WIDTH)
    key = geometry = clone.repeat(clones + 1, 1)
    key[0] += hijack.FAR
    if base is not None:
        angles = torch.arange(clones + 1.0)[:, None] * base ** (-torch.arange(WIDTH / 2) * 2 / WIDTH)
        turned = torch.view_as_complex(key.view(-1, WIDTH // 2, 2)) * torch.exp(1j * angles.double())
        key = torch.view_as_real(turned).flatten(1)
    compared = key if rotated else geometry
    query = torch.zeros_like(key)[None]
    weights = candidate.weights(query, key[None], is_causal=causal, geometry=compared[None])
    return weights[0, -1] * (clones + 1)


@SECTION.fact(0.1)
def hidden_state() -> RowIterator:
    """Measure the share of a crowd of 50 in the norm of the hidden state, with both forms of the gate.

    The hidden state is the token's own state plus the output. That state and the values of crowd and unique
    key have length 1 and are orthogonal, so the share is c / sqrt(1 + c^2 + u^2) for total weights c and u.
    """
    gates = {START: Gate(1.0, 0.0, 1.0), FITTED: fitted_gate()}
    for (kind, gate), where, (crowd, logit) in itertools.product(gates.items(), _FORMS, _LOGITS.items()):
        candidate = GatedCandidate("magnitude", "magnitude", gate=gate, where=where)
        weights = hijack.weights_of(candidate, CROWD, unique=logit)
        cluster, unique = float(weights[1:].sum()), float(weights[0])
        row = {"gate": kind, "where": where, "crowd": crowd, "unique": unique}
        yield row | {"share": cluster / math.hypot(1, cluster, unique)}


@SECTION.table(
    "What clones count as",
    "case",
    *(f"{CROWD}, {name}" for name in MECHANISMS),
    *(f"{MANY}, {name}" for name in MECHANISMS[1:]),
)
def _table(results: Results) -> Rows:
    """Heads of width 64; β, γ and t (density: p and t) are fitted so that crowds of 2 to 50 count as one, for
    causal cases in the causal form.

    Rotary: clones at neighbouring positions, bases 10000 and 100000; swapped models compare keys before
    rotation. Rotated keys: those of 12 random clones for each base.
    """

    def counts(case: str, clones: int, names: Sequence[str]) -> list[str]:
        return [str(count_of(results, case, clones, name)) for name in names]

    known = CASES if results.get("gates") else ()
    nothing = [""] * len(MECHANISMS[1:])
    many = {case: counts(case, MANY, MECHANISMS[1:]) if case in COUNTED_MANY else nothing for case in known}
    return [(case, *counts(case, CROWD, MECHANISMS), *many[case]) for case in known]


def count_of(results: Results, case: str, clones: int = CROWD, mechanism: str = "magnitude") -> Estimate:
    """Return what ``clones`` clones count as in a case of :data:`CASES`."""
    return mean_of(results.rows("gates"), "count", under=mechanism, case=case, clones=clones)


def all_counts(results: Results) -> dict[str, dict[str, float]]:
    """Return what clones count as for every mechanism and case: ``counts["50 magnitude"]["fitted"]``."""
    return {
        f"{clones} {name}": {case: count_of(results, case, clones, name).value for case in cases}
        for clones, cases in ((CROWD, CASES), (MANY, COUNTED_MANY))
        for name in MECHANISMS
    }


def _counts(results: Results) -> str:
    return "; ".join(f"{case} {count_of(results, case)}" for case in CASES)


@SECTION.experiment(ROSIC, "The magnitude gate keeps clones from taking over.")
def _gate(results: Results) -> Finding:
    """Five cases: at initialisation; fitted; fitted, causal; fitted, in a rotary model; fitted, where rotated
    keys are compared. Supported if 50 clones count as one within a factor of 2 in every case, and 1000
    clones in the first four; partly if 50 do in some case.

    Refuted: 50 clones count as more than 2, or less than half, in every case.
    """
    few = [from_one(count_of(results, case).value) <= 2 for case in CASES]
    large = [count_of(results, case, MANY).value for case in COUNTED_MANY]
    many = [from_one(count) <= 2 for count in large]
    return grade(all(few + many), any(few)), (
        f"{CROWD} clones count as: {_counts(results)}. {MANY} clones count as"
        f" {', '.join(f'{count:.3g}' for count in large)} in the first four cases"
    )


@SECTION.experiment(ROSIC, "A gated cluster of 50 clones counts as one unit of information.")
def _one_unit(results: Results) -> Finding:
    """The same five cases: at initialisation; fitted; fitted, causal; fitted, in a rotary model; fitted,
    where rotated keys are compared. Supported if 50 clones count as one within 10 % in every case; partly
    if within a factor of 2 in some case.

    Refuted: They count as more than 2, or less than half, in every case.
    """
    away = [from_one(count_of(results, case).value) for case in CASES]
    fitted = results.rows("gates", under="magnitude", case=FITTED)[0]
    return grade(max(away) < 1.1, min(away) < 2), (
        f"{CROWD} clones count as: {_counts(results)}. The fitted gate has β = {fitted['beta']:.3g},"
        f" γ = {fitted['gamma']:.3g}, t = {fitted['t']:.3g}"
    )


@SECTION.experiment(ROSIC, "Redundant tokens shrink to near 0.")
def _gates_shrink(results: Results) -> Finding:
    """The gate of one of 50 clones, bidirectional and without positions: supported if it is below 0.05 at
    initialisation and when fitted; partly if in one of the two.

    Refuted: It is above 0.05 in both.
    """
    start, fitted = (
        results.rows("gates", under="magnitude", case=case, clones=CROWD)[0] for case in (START, FITTED)
    )
    near = [row["clone_gate"] < 0.05 for row in (start, fitted)]
    return grade(all(near), any(near)), (
        f"the gate of one of {CROWD} clones is {start['clone_gate']:.3f} at initialisation and"
        f" {fitted['clone_gate']:.3f} when fitted; that of a"
        f" unique key {start['unique_gate']:.3f} and {fitted['unique_gate']:.3f}"
    )


@SECTION.experiment(
    ROSIC,
    "A gate on the values is better than one that only changes scores: it attenuates redundant features in"
    " the hidden state.",
)
def _values_or_mass(results: Results) -> Finding:
    """Share of 50 clones in the norm of the hidden state: alone, with an equally relevant key, and with
    one 20 times as relevant. Supported if in all three, at initialisation and fitted, it is below 0.05
    with the gate on values and smaller than with the gate on the mass, which only changes scores; partly
    if so with the fitted gate.

    Refuted: With the fitted gate on values the share is 0.05 or more, or no smaller than with the other.
    """
    held, shares = {}, []
    for kind in (START, FITTED):
        values, mass = (
            [results.rows("hidden state", gate=kind, where=where, crowd=crowd)[0] for crowd in _LOGITS]
            for where in _FORMS
        )
        held[kind] = all(a["share"] < min(0.05, b["share"]) for a, b in zip(values, mass, strict=True))
        pairs = zip(values, mass, strict=True)
        both = [f"{a['share']:.3f} against {b['share']:.3f} {a['crowd']}" for a, b in pairs]
        kept = f"the key 20 times as relevant has the weight {values[-1]['unique']:.2f} against"
        shares.append(f"{kind} {', '.join(both)} ({kept} {mass[-1]['unique']:.2f})")
    return grade(all(held.values()), held[FITTED]), (
        f"share of {CROWD} clones in the norm of the hidden state, gate on values against gate on the mass:"
        f" {'; '.join(shares)}"
    )
