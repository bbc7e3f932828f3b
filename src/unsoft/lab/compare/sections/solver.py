"""Steps of the magnitude solver and stability of its result, against the exact solution.

Conjugate gradients against the exact solution: the weights of single keys, and their total.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from unsoft.errors import SolverError
from unsoft.lab.compare.candidate import normals
from unsoft.lab.compare.jobs import Job, Results, RowIterator, Rows
from unsoft.lab.compare.section import PRICE, ROSIC, Finding, Request, Section, job
from unsoft.lab.evidence import grade, paired_ratio
from unsoft.lab.report.figure import Figure, by_value
from unsoft.magnitude import weighting

STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
RIDGES = (1e-1, 1e-2, 1e-3, 1e-4)
KEYS, WIDTH = 256, 64
KINDS = ("distinct keys", "crowds, nearly coinciding")
APART = (1e-3, 1e-2, 1e-1)
"""Distances per coordinate of keys that nearly coincide; the first is the hardest."""


_ASKED = "How many steps does magnitude need?"
SECTION = Section(order=50, group=PRICE, about_mechanisms=("magnitude",), question=_ASKED, about=__doc__)


@SECTION.jobs
def _jobs(request: Request) -> list[Job]:
    return [job(f"solver, {kind}", None, solver, 0.5, kind=kind) for kind in KINDS]


def keys_of(kind: str) -> Tensor:
    """Return distinct standard normal keys, or crowds: eight centres whose 32 members differ by 1e-2."""
    normal = normals(5)
    if kind == KINDS[0]:
        return normal(KEYS, WIDTH)
    return (normal(8, 1, WIDTH) + 1e-2 * normal(8, KEYS // 8, WIDTH)).flatten(0, 1)


def solver(kind: str) -> Rows:
    """Measure the errors of truncated conjugate gradients by the ridge and the number of steps."""
    points, rows = keys_of(kind), []
    for eps in RIDGES:
        exact = weighting(points, eps=eps, solver="cholesky")
        for steps in STEPS:
            cut = weighting(points, eps=eps, solver="cg", iterations=steps, throw=False)
            error = (cut.weights - exact.weights).norm() / exact.weights.norm()
            total = (cut.magnitude - exact.magnitude).abs() / exact.magnitude.abs()
            gates = (cut.weights.sigmoid() - exact.weights.sigmoid()).abs().max()
            row = {"keys": kind, "eps": eps, "steps": steps, "weights": float(error), "total": float(total)}
            rows.append(row | {"gate": float(gates), "magnitude": float(exact.magnitude)})
    return rows


@SECTION.fact(0.1)
def stability(draws: int) -> RowIterator:
    """Measure how far the weights of nearly equal keys move if the keys move by 1e-6, in float32."""
    for draw, apart in itertools.product(range(draws), APART):
        normal = normals(12 + draw, torch.float32)
        keys = normal(1, WIDTH) + apart * normal(64, WIDTH)
        moved = keys + 1e-6 * normal(64, WIDTH)
        for eps in (0.0, 0.01):
            yield {"eps": eps, "apart": apart, "draw": draw} | _moved(keys, moved, eps)


def _moved(keys: Tensor, moved: Tensor, eps: float) -> dict[str, Any]:
    try:
        before, after = (weighting(x, eps=eps, solver="cholesky", throw=False) for x in (keys, moved))
    except SolverError as problem:
        return {"status": str(problem).splitlines()[0], "change": None, "largest": None}
    change = float((before.weights - after.weights).norm() / before.weights.norm())
    return {
        "status": before.status.name.lower(),
        "change": change if math.isfinite(change) else None,
        "largest": float(before.weights.abs().max().nan_to_num()),
    }


@SECTION.fact(0.2, name="slopes of weights")
def slopes() -> RowIterator:
    """Measure the largest |d weights . r / d keys| over random directions r, of nearly equal keys."""
    normal = normals(14)
    keys = normal(1, WIDTH) + 1e-2 * normal(64, WIDTH)
    directions = normal(4, 64)
    for eps in (1e-6, 1e-4, 1e-2, 1e-1):
        sizes = []
        for direction in directions:
            moving = keys.clone().requires_grad_()
            weights = weighting(moving, eps=eps, solver="cholesky", throw=False).weights
            (slope,) = torch.autograd.grad((weights * direction).sum(), moving)
            sizes.append(float(slope.norm()))
        yield {"eps": eps, "largest": max(sizes)}


@SECTION.figures
def figures(results: Results) -> Iterator[Figure]:
    note = f"{KEYS} keys of {WIDTH} dimensions, t = 1, against the exact solution in float64."
    titles = {"x_title": "steps of conjugate gradients", "y_title": "relative error", "by_title": "ε"}
    axes: dict[str, Any] = titles | {"log_x": True, "log_y": True, "y_domain": [1e-9, 2]}
    for kind, short in zip(KINDS, ("distinct", "crowds"), strict=True):
        rows = results.get(f"solver, {kind}")
        for field, title in (("weights", "Weights"), ("total", "Total")) if rows else ():
            shown = [row | {field: max(row[field], 1e-12)} for row in rows]
            chart = by_value(shown, "steps", field, "eps", **axes)
            yield Figure(f"solver-{short}-{field}", f"{title}: {kind}", note, rows, chart)


@SECTION.experiment(ROSIC, "3 to 5 steps of conjugate gradients find the optimal weights.")
def _few_steps(results: Results) -> Finding:
    """ε = 0.1, 256 keys, distinct ones and crowds: supported if 3 and 5 steps both leave the weights
    within 1 % of the exact ones in both sets; partly if 5 steps do. Whether the gates sigmoid(w) are
    within 0.01 is said besides.

    Refuted: After 5 steps the weights of one set are off by more than 1 %.
    """
    held, errors = {}, []
    for steps in (3, 5):
        distinct, crowds = (results.rows(f"solver, {kind}", eps=0.1, steps=steps)[0] for kind in KINDS)
        held[steps] = [row["weights"] < 0.01 for row in (distinct, crowds)]
        errors.append(
            f"after {steps} steps weights are off by {distinct['weights']:.0%} for distinct keys and"
            f" {crowds['weights']:.0%} for crowds, the total by"
            f" {distinct['total']:.0%} and {crowds['total']:.0%}, single gates sigmoid(w) by up to"
            f" {(gate := max(distinct['gate'], crowds['gate'])):.3f},"
            f" {'near enough' if gate < 0.01 else 'too far'} for 0.01"
        )
    return grade(all(held[3]) and all(held[5]), all(held[5])), f"ε = 0.1: {'; '.join(errors)}"


def _changes(results: Results, eps: float, apart: float = APART[0]) -> list[float] | str:
    """Return how far weights move in each draw, or why they could not be computed."""
    rows = results.rows("stability", eps=eps, apart=apart)
    lost = [row["status"] for row in rows if row["change"] is None]
    return lost[0] if lost else [row["change"] for row in rows]


@SECTION.experiment(ROSIC, "The weights are unique and stable unless keys are perfect clones.")
def _steady(results: Results) -> Finding:
    """64 distinct keys 0.001, 0.01 or 0.1 apart in every coordinate, no ridge, float32, all moved by
    1e-6: supported if at each distance the weights change by less than 1 % in every draw and no weight
    exceeds 1 in size, as if one key were several; partly if at two of the three distances.

    Refuted: They change by 1 % or more, or one exceeds 1, at two of the three distances.
    """
    held, parts = [], []
    for apart in APART:
        changes = _changes(results, 0.0, apart)
        if isinstance(changes, str):
            held.append(False)
            parts.append(f"{apart:g} apart: {changes}")
            continue
        largest = max(row["largest"] for row in results.rows("stability", eps=0.0, apart=apart))
        held.append(max(changes) < 0.01 and largest <= 1)
        parts.append(f"{apart:g} apart: by up to {max(changes):.2g}, the largest weight is {largest:.3g}")
    return grade(all(held), sum(held) >= 2), (
        f"without a ridge, if keys move by 1e-6, the weights move by this share of their size:"
        f" {'; '.join(parts)}"
    )


@SECTION.experiment(ROSIC, "Tikhonov regularisation keeps the solution stable where keys nearly coincide.")
def _tikhonov(results: Results) -> Finding:
    """64 keys 0.001 apart in every coordinate, float32, all moved by 1e-6: supported if ε = 0.01 makes the
    change a hundred times smaller than without a ridge, by the lower end of the interval over draws, and
    below 1e-3 in every draw.

    Refuted: With ε = 0.01 the weights still change by 1e-3 or more.
    """
    bare, ridge = _changes(results, 0.0), _changes(results, 0.01)
    if isinstance(ridge, str):
        return grade(False), f"with ε = 0.01: {ridge}"
    start = f"if nearly equal keys move by 1e-6, weights move by {max(ridge):.2g} of their size with ε = 0.01"
    if isinstance(bare, str):
        return grade(max(ridge) < 1e-3), f"{start}; without the ridge: {bare}"
    times = paired_ratio(bare, ridge)
    calm = times.lower > 100 and max(ridge) < 1e-3
    return grade(calm), f"{start}, and {times} times as far without the ridge"


@SECTION.experiment(ROSIC, "With the ridge gradients do not explode.")
def _calm_gradients(results: Results) -> Finding:
    """Nearly equal keys, ε from 1e-6 to 0.1: supported if the largest gradient falls by a factor of 100
    and is below 10 for some ε; partly if it only falls.

    Refuted: The ridge does not make gradients a hundred times smaller.
    """
    rows = results.rows("slopes of weights")
    least, most = rows[0], rows[-1]
    calm = [row["eps"] for row in rows if row["largest"] < 10]
    falls = most["largest"] < least["largest"] / 100
    return grade(falls and bool(calm), falls), (
        "largest gradient of the weights of nearly equal keys: "
        + ", ".join(f"{row['largest']:.3g} at ε = {row['eps']:g}" for row in rows)
    )
