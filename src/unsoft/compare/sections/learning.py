"""Does a key that starts at a low logit get found by gradients? Steps until it holds half of the mass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from unsoft.compare.claim import EXPERIMENT, SURVEY, Claim, Finding, grade
from unsoft.compare.column import Column
from unsoft.compare.estimate import Estimate, estimate, paired_ratio
from unsoft.compare.jobs import Job, Results
from unsoft.compare.section import Request, Section, job
from unsoft.compare.subject import Subject
from unsoft.report.comparison.page import Part

KEYS, START, LIMIT, DRAWS = 16, -4.0, 100, 8
RATES = tuple(4.0**k for k in range(0, 8))
_BOUND = 80.0
"""Logits are kept within this, so that a rate that is too large fails instead of overflowing."""


def jobs(request: Request) -> list[Job]:
    return [job("learning", s, partial(learning, s), 0.5) for s in request.everyone]


def learning(subject: Subject) -> list[dict[str, Any]]:
    """Steps of gradient descent on all logits of a row until the key in question holds half of the mass.

    Its logit starts at -4, the others at N(0, 1); values are orthonormal and the loss is half the squared
    error of
    the output against that key's value, sum_j a_j^2 / 2 with a - 1 for the key. The rate is the one of a
    grid that
    needs the fewest steps on average; a draw that never gets there counts as the limit.
    """
    generator = torch.Generator().manual_seed(23)
    start = torch.randn(DRAWS, KEYS, generator=generator, dtype=torch.float32)
    start[:, 0] = START
    logits = start.repeat(len(RATES), 1)
    rates = torch.tensor(RATES, dtype=torch.float32).repeat_interleave(DRAWS)[:, None]
    target = torch.eye(KEYS, dtype=torch.float32)[0]
    steps = torch.full((len(logits),), LIMIT)
    weigh = subject.row(width=KEYS)
    for step in range(LIMIT):
        x = logits.detach().requires_grad_()
        weights = weigh(x)
        mass = weights.detach().abs().sum(-1)
        holds = (weights.detach()[:, 0] >= 0.5 * mass) & (mass > 0)
        steps = torch.where(holds & (steps == LIMIT), step, steps)
        if bool((steps.view(len(RATES), DRAWS) < LIMIT).all(1).any()) or not weights.requires_grad:
            break
        (slope,) = torch.autograd.grad((weights - target).square().sum() / 2, x)
        if not slope.any():
            break  # nothing will ever move
        logits = (logits - rates * slope.nan_to_num()).clamp(-_BOUND, _BOUND)
    table = steps.view(len(RATES), DRAWS).double()
    best = int(table.mean(1).argmin())
    return [{"draw": k, "rate": RATES[best], "steps": int(x)} for k, x in enumerate(table[best])]


def steps(results: Results, label: str) -> Estimate | None:
    rows = results.get("learning", label)
    return estimate([row["steps"] for row in rows]) if rows else None


def parts(results: Results) -> Iterator[Part]:
    titles, rows = ("mechanism", "steps", "interval", "best rate"), []
    for label in results.labels:
        found = steps(results, label)
        if found is not None:
            said = f"at least {LIMIT}" if found.value >= LIMIT else str(found)
            rate = results.get("learning", label)[0]["rate"] if found.value < LIMIT else None
            rows.append(dict(zip(titles, (label, found.value, said, rate), strict=True)))
    if rows:
        text = (
            f"Gradient descent on the {KEYS} logits of a row; one starts at {START:g} and should hold half"
            f" of the mass. The best of"
            f" {len(RATES)} learning rates, {DRAWS} draws, at most {LIMIT} steps."
        )
        columns = [{"name": name, "title": name, "help": ""} for name in titles]
        yield Part("Steps until a key that starts at −4 is found", text, columns, rows)


def _needed(results: Results, label: str) -> list[float]:
    return [max(float(row["steps"]), 1.0) for row in results.rows("learning", label)]


def _hard(results: Results) -> Finding:
    softmax, cog = _needed(results, "softmax"), _needed(results, "cog")
    ratio = paired_ratio(softmax, cog)
    low = ratio.low if ratio.low is not None else ratio.value
    return grade(low > 4, low > 1), (
        f"at the best learning rate softmax needs {estimate(softmax)} steps, cog {estimate(cog)}: {ratio}"
        f" times as many"
    )


def _cured(results: Results) -> Finding:
    softmax, gpam = _needed(results, "softmax"), _needed(results, "gpam")
    ratio = paired_ratio(softmax, gpam)
    low = ratio.low if ratio.low is not None else ratio.value
    return grade(low > 2, low > 1), (
        f"at the best learning rate softmax needs {estimate(softmax)} steps, gpam {estimate(gpam)}: {ratio}"
        f" times as many"
    )


SECTION = Section(
    name="learning",
    order=36,
    title="Learning",
    question="Can it learn to look at what it ignored?",
    jobs=jobs,
    parts=parts,
    columns=[
        Column(
            "learns",
            "learns from logit −4?",
            "gradient steps until a key that starts at logit −4 holds half of the mass, at the best"
            " learning rate",
            steps,
            8.0,
            LIMIT - 1e-9,
            low_is_good=True,
            unit="steps",
            why=(
                "1 step: the first gradient already points there. Yes up to 8, half of what softmax needs"
                " (about 17); partly if it gets"
                f" there within {LIMIT}; no if it never does, as with an output of zeros, random weights"
                f" and what is flat below 0."
            ),
            limit=LIMIT,
        )
    ],
    claims=[
        Claim(
            "hard-to-learn",
            SURVEY,
            "Softmax's tiny weights give tiny gradients, so what was ignored is hard to learn.",
            EXPERIMENT,
            "Eight draws, each mechanism at its best rate, steps compared draw by draw: holds if softmax"
            " needs more than 4 times as"
            " many steps as cog, by the lower end of the interval; with limits if more at all.",
            "softmax needs no more steps than cog.",
            _hard,
        ),
        Claim(
            "gpam-gradient",
            SURVEY,
            "GPAM's second map cures the vanishing gradient of softmax.",
            EXPERIMENT,
            "The same draws: holds if softmax needs more than twice as many steps as gpam, by the lower end"
            " of the interval; with"
            " limits if more at all.",
            "softmax needs no more steps than gpam.",
            _cured,
        ),
    ],
)
