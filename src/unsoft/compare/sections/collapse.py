"""Do tokens become the same? Random attention layers on top of one
another, with and without a skip connection.

Queries and keys are random projections of the states. With skip connections values are too, as in a network
before training; without them values are the states themselves: nothing but the mixing is seen, and a token
can still be compared with what it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft import measure
from unsoft.compare.jobs import Job, Missing, Results
from unsoft.compare.level import Level
from unsoft.compare.section import SURVEY, Claim, Column, Finding, Request, Section, grade, job
from unsoft.compare.subject import Subject
from unsoft.report.comparison.page import Control
from unsoft.report.figure import Figure, by_mechanism

TOKENS, HEADS, HEAD = 48, 4, 16
_SMALL = 1e-7
"""The bottom of logarithmic charts."""


def jobs(request: Request) -> list[Job]:
    level = request.level
    sizes = {"depth": level.depth, "seeds": level.seeds}
    return [
        job("collapse", s, partial(collapse, s, level), level.depth * level.seeds * 0.012, sizes)
        for s in request.everyone
    ]


def collapse(subject: Subject, level: Level) -> list[dict[str, Any]]:
    """Residual over norm, mean cosine and recovery after each layer, means over random networks."""
    rows = []
    for skip in (False, True):
        found = [_stack(subject, level.depth, skip, seed) for seed in range(level.seeds)]
        for depth, at_depth in enumerate(zip(*found, strict=True)):
            means = [sum(one[k] for one in at_depth) / len(at_depth) for k in range(3)]
            measures = {"residual": means[0], "cosine": means[1], "recovery": means[2]}
            rows.append({"skip": skip, "depth": depth} | measures)
    return rows


def _stack(subject: Subject, depth: int, skip: bool, seed: int) -> list[tuple[float, float, float]]:
    generator = torch.Generator().manual_seed(100 + seed)
    states = inputs = torch.randn(TOKENS, HEADS * HEAD, generator=generator)
    found = [_measured(states, inputs)]
    for _ in range(depth):
        shape = (4, HEADS * HEAD, HEADS * HEAD)
        projections = torch.randn(shape, generator=generator) / math.sqrt(HEADS * HEAD)
        q, k, v = (states @ w for w in projections[:3])
        if skip:
            states = states + _attend(subject, q, k, v) @ projections[3]
        else:
            states = _attend(subject, q, k, states)
        # Only the scale of the whole is set right, so that neither 0 nor infinity is reached;
        # differences between tokens stay.
        states = states / states.square().mean().sqrt().clamp(min=1e-30)
        found.append(_measured(states, inputs))
    return found


def _attend(subject: Subject, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All heads at once; each is a batch entry with its own queries and keys."""
    query, key, value = (x.view(TOKENS, HEADS, HEAD).transpose(0, 1) for x in (q, k, v))
    with torch.no_grad():
        weights = subject.weights(query, key, is_causal=True)
    return (weights @ value).transpose(0, 1).flatten(1)


def _measured(states: Tensor, inputs: Tensor) -> tuple[float, float, float]:
    residual = measure.residual(states) / states.norm().clamp(min=1e-30)
    return float(residual), float(measure.mean_cosine(states)), float(measure.recovery(states, inputs))


def figures(results: Results) -> Iterator[Figure]:
    rows = [row | {"skip": int(row["skip"])} for row in results.each("collapse")]
    if not rows:
        return
    chance = f"1: all; at the bottom 1/{TOKENS}, chance."
    noise = "0: all tokens are the same. A large residual alone is not information, noise has one too."
    for field, title, note, log in (
        ("residual", "Residual over norm", noise, True),
        ("recovery", "Tokens that can be told by their input", chance, False),
    ):
        kept = [row for row in rows if not log or row[field] > _SMALL]
        chart = by_mechanism(
            results.labels,
            kept,
            "depth",
            field,
            x_title="layers",
            y_title=title.lower(),
            dots=[],
            log_y=log,
            choose={"skip": 0},
            y_domain=[1e-4, 1] if log else [0, 1],
        )
        yield Figure(f"collapse-{field}", title, note, kept, chart)


def _last_depth(field: str, skip: bool) -> Callable[[Results, str], float | None]:
    def answer(results: Results, label: str) -> float | None:
        rows = [row for row in results.get("collapse", label) if row["skip"] is skip]
        return float(rows[-1][field]) if rows else None

    return answer


def slower(results: Results) -> Finding:
    ratios, ends = {}, {}
    for skip in (False, True):
        softmax, gpam = (
            {row["depth"]: row["residual"] for row in results.rows("collapse", name) if row["skip"] is skip}
            for name in ("softmax", "gpam")
        )
        middle = max(softmax) // 2
        if not softmax[middle]:
            raise Missing("softmax collapsed before the middle layer")
        ratios[skip] = gpam[middle] / softmax[middle]
        ends[skip] = (softmax[max(softmax)], gpam[max(gpam)])
    held = [ratio > 1.05 for ratio in ratios.values()]
    at = f"softmax ends at {ends[False][0]:.1g} and gpam at {ends[False][1]:.1g}"
    last = f"without them {at} after {max(softmax)} layers"
    return grade(all(held), any(held)), (
        f"residual of gpam over softmax's after {middle} random layers: {ratios[False]:.2f} without,"
        f" {ratios[True]:.2f} with skip"
        f" connections; {last}"
    )


SECTION = Section(
    name="collapse",
    order=40,
    title="Collapse",
    question="Do tokens become the same?",
    about=(
        f"Random queries and keys in every layer, {TOKENS} tokens. Without skip connections the values are"
        " the tokens themselves, so that"
        " nothing but the mixing is seen; with them values are random projections, as in a network before"
        " training."
    ),
    jobs=jobs,
    figures=figures,
    controls=[Control("skip", "Skip connections", [(0, "without"), (1, "with")])],
    columns=[
        Column(
            "rank",
            "keeps rank?",
            (
                "residual over norm after the deepest layer, attention only: 0 means that all tokens are the"
                " same"
            ),
            _last_depth("residual", False),
            0.5,
            0.1,
        ),
        Column(
            "identity",
            "keeps tokens apart?",
            "tokens that can be told by their input after the deepest layer, with skip connections",
            _last_depth("recovery", True),
            0.75,
            0.25,
        ),
    ],
    claims=[
        Claim(
            "slower-collapse",
            SURVEY,
            "GPAM's representations collapse more slowly than softmax's.",
            "softmax gpam --only collapse",
            slower,
        )
    ],
)
