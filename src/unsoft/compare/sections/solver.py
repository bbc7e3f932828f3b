"""How many steps of conjugate gradients does magnitude need?

Weights and total against the exact solution, and what is known of sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft.compare.jobs import Job, Results
from unsoft.compare.level import Level
from unsoft.compare.section import CLAIMS, ROSIC, Claim, Finding, Request, Section, grade, job
from unsoft.errors import SolverError
from unsoft.magnitude import weighting
from unsoft.report.figure import Figure, by_value

STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
RIDGES = (1e-1, 1e-2, 1e-3, 1e-4)
KEYS, WIDTH = 256, 64
KINDS = ("distinct keys", "crowds, nearly coinciding")


def jobs(request: Request) -> list[Job]:
    return [job(f"solver, {kind}", None, partial(solver, kind), 0.5) for kind in KINDS]


def facts(level: Level) -> list[Job]:
    return [job("magnitude of sets", None, sets, 0.3), job("stability", None, stability, 0.1)]


def keys_of(kind: str) -> Tensor:
    """Distinct: standard normal, t = 1. Crowds: eight centres whose 32 members differ by 1e-2."""
    generator = torch.Generator().manual_seed(5)
    if kind == KINDS[0]:
        return torch.randn(KEYS, WIDTH, generator=generator, dtype=torch.float64)
    centres = torch.randn(8, 1, WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(8, KEYS // 8, WIDTH, generator=generator, dtype=torch.float64)
    return (centres + 1e-2 * noise).flatten(0, 1)


def solver(kind: str) -> list[dict[str, Any]]:
    points, rows = keys_of(kind), []
    for eps in RIDGES:
        exact = weighting(points, eps=eps, solver="cholesky")
        for steps in STEPS:
            found = weighting(points, eps=eps, solver="cg", iterations=steps, throw=False)
            error = (found.weights - exact.weights).norm() / exact.weights.norm()
            total = (found.magnitude - exact.magnitude).abs() / exact.magnitude.abs()
            rows.append(
                {
                    "keys": kind,
                    "eps": eps,
                    "steps": steps,
                    "weights": float(error),
                    "total": float(total),
                    "magnitude": float(exact.magnitude),
                }
            )
    return rows


def sets() -> list[dict[str, Any]]:
    """Magnitude weights of sets whose answer is known."""
    generator = torch.Generator().manual_seed(11)

    def cloud(count: int, size: float = 1.0) -> torch.Tensor:
        return size * torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)

    eps, rows = 1e-9, []
    for count in (2, 10, 50):
        clones = cloud(1).expand(count, WIDTH)
        found = weighting(clones, eps=eps, solver="cholesky", throw=False)
        rows.append(
            {
                "set": "clones",
                "count": count,
                "expected": 1 / count,
                "found": float(found.weights.mean()),
                "spread": float(found.weights.max() - found.weights.min()),
            }
        )
    lonely = torch.cat([cloud(20, 0.1), cloud(1) + 40])
    rows.append(
        {
            "set": "isolated",
            "count": 21,
            "expected": 1.0,
            "found": float(weighting(lonely, eps=eps).weights[-1]),
        }
    )
    first, second = cloud(30, 0.5), cloud(40, 0.5) + 60
    parts = [float(weighting(x, eps=eps).magnitude) for x in (first, second)]
    whole = float(weighting(torch.cat([first, second]), eps=eps).magnitude)
    rows.append({"set": "far apart", "count": 70, "expected": sum(parts), "found": whole})
    largest = max(
        float(weighting(cloud(64, size), eps=eps).magnitude) / 64
        for size in (0.1, 0.3, 1.0, 3.0, 10.0)
        for _ in range(4)
    )
    rows.append({"set": "bound", "count": 64, "expected": 1.0, "found": largest})
    return rows


def stability() -> list[dict[str, Any]]:
    """Nearly equal keys in float32: what the exact solver says, and
    how far weights move if keys move by 1e-6.
    """
    generator = torch.Generator().manual_seed(12)
    keys = torch.randn(1, WIDTH, generator=generator) + 1e-3 * torch.randn(64, WIDTH, generator=generator)
    moved = keys + 1e-6 * torch.randn(64, WIDTH, generator=generator)
    rows = []
    for eps in (0.0, 1e-6, 1e-4, 1e-2, 1e-1):
        try:
            found, other = (weighting(x, eps=eps, solver="cholesky", throw=False) for x in (keys, moved))
        except SolverError as problem:
            rows.append(
                {
                    "eps": eps,
                    "status": str(problem).splitlines()[0],
                    "change": None,
                    "largest": None,
                    "total": None,
                }
            )
            continue
        change = float((found.weights - other.weights).norm() / found.weights.norm())
        rows.append(
            {
                "eps": eps,
                "status": found.status.name.lower(),
                "change": change if math.isfinite(change) else None,
                "largest": float(found.weights.abs().max().nan_to_num()),
                "total": float(found.magnitude.nan_to_num()),
            }
        )
    return rows


def figures(results: Results) -> Iterator[Figure]:
    note = f"{KEYS} keys of {WIDTH} dimensions, t = 1, against the exact solution in float64."
    for kind, short in zip(KINDS, ("distinct", "crowds"), strict=True):
        rows = results.get(f"solver, {kind}")
        for field, title in (("weights", "Weights"), ("total", "Total")) if rows else ():
            chart = by_value(
                [row | {field: max(row[field], 1e-12)} for row in rows],
                "steps",
                field,
                "eps",
                x_title="steps of conjugate gradients",
                y_title="relative error",
                by_title="ε",
                log_y=True,
                log_x=True,
                y_domain=[1e-9, 2],
            )
            yield Figure(f"solver-{short}-{field}", f"{title}: {kind}", note, rows, chart)


def _set(results: Results, name: str) -> list[dict[str, Any]]:
    return [row for row in results.rows("magnitude of sets") if row["set"] == name]


def _clones(results: Results) -> Finding:
    rows = _set(results, "clones")
    error = max(abs(row["found"] - row["expected"]) / row["expected"] for row in rows)
    return grade(error < 1e-4), ", ".join(f"{row['count']} clones: {row['found']:.4f} each" for row in rows)


def _isolated(results: Results) -> Finding:
    found = _set(results, "isolated")[0]["found"]
    return grade(abs(found - 1) < 1e-4), f"weight {found:.6f} of a key far from twenty others"


def _additive(results: Results) -> Finding:
    row = _set(results, "far apart")[0]
    return grade(abs(row["found"] - row["expected"]) < 1e-6 * row["expected"]), (
        f"the union has {row['found']:.6f}, its parts together {row['expected']:.6f}"
    )


def _bound(results: Results) -> Finding:
    found = _set(results, "bound")[0]["found"]
    return grade(
        found <= 1 + 1e-9
    ), f"largest magnitude over number of points in twenty random sets: {found:.6f}"


def _few_steps(results: Results) -> Finding:
    rows = [
        row
        for kind in ("distinct keys", "crowds, nearly coinciding")
        for row in results.rows(f"solver, {kind}")
    ]
    at = {(row["keys"], row["eps"], row["steps"]): row for row in rows}
    distinct, crowds = (at[kind, 0.01, 5] for kind in ("distinct keys", "crowds, nearly coinciding"))
    good = (
        [row["total"] < 0.01 for row in (distinct, crowds)],
        [row["weights"] < 0.01 for row in (distinct, crowds)],
    )
    return grade(all(good[0]) and all(good[1]), distinct["total"] < 0.05), (
        f"after 5 steps at ε = 0.01 the total is off by {distinct['total']:.1%} for distinct keys and"
        f" {crowds['total']:.1%} for crowds, "
        f"the weights by {distinct['weights']:.0%} and {crowds['weights']:.0%}:"
        f" {'' if all(good[0]) else 'not '}enough for the total, "
        f"{'' if all(good[1]) else 'not '}for the weights"
    )


def _stable(results: Results) -> Finding:
    rows = {row["eps"]: row for row in results.rows("stability")}
    bare, ridge = rows[0.0], rows[0.01]
    worse = bare["change"] is None or bare["change"] > 100 * ridge["change"]
    without = bare["status"] if bare["change"] is None else f"by {bare['change']:.0%}"
    return grade(worse and ridge["change"] < 1e-3), (
        f"if nearly equal keys move by 1e-6, weights move {without} without the ridge and by"
        f" {ridge['change']:.1g} with ε = 0.01"
    )


_FACTS = f"--only {CLAIMS}"
SECTION = Section(
    name="solver",
    order=50,
    title="Solver",
    question="How many steps does magnitude need?",
    about=(
        "Conjugate gradients against the exact solution. The total of the weights settles before the weights"
        " of single keys do, above all"
        " where keys nearly coincide."
    ),
    jobs=jobs,
    facts=facts,
    figures=figures,
    claims=[
        Claim("clones-share", ROSIC, "N identical keys get the weight 1/N each.", _FACTS, _clones),
        Claim("isolated", ROSIC, "An isolated key keeps the weight 1.", _FACTS, _isolated),
        Claim("additive", ROSIC, "Magnitude is additive over sets that are far apart.", _FACTS, _additive),
        Claim("bound", ROSIC, "Magnitude is at most the number of points.", _FACTS, _bound),
        Claim(
            "few-steps",
            ROSIC,
            "3 to 5 steps of conjugate gradients find the optimal weights.",
            "--only solver",
            _few_steps,
        ),
        Claim(
            "tikhonov",
            ROSIC,
            "Tikhonov regularisation keeps the solution stable where keys nearly coincide.",
            _FACTS,
            _stable,
        ),
    ],
)
