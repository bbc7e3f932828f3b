"""Learning from a low logit: gradient steps until a key holds half of the mass."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unsoft.lab.compare.candidate import Candidate, normals
from unsoft.lab.compare.jobs import Job, Results, Rows
from unsoft.lab.compare.section import EXPERIMENT, SURVEY, Finding, Request, ScoreColumn, Section, claim, job
from unsoft.lab.evidence import Estimate, censored_mean, grade, paired_ratio, t_interval
from unsoft.lab.report.comparison import Part

KEYS, START, LIMIT, DRAWS = 16, -4.0, 100, 8
RATES = tuple(2.0**k for k in range(11))
_STRIDE = 8.0
"""A rate is too large if a step moves a logit by more than this, the way from -4 to 4."""


def jobs(request: Request) -> list[Job]:
    return [job("learning", c, learning, 0.5) for c in request.with_references("softmax", "cog", "gpam")]


def learning(candidate: Candidate) -> Rows:
    """Count steps of gradient descent on all logits of a row until one key holds half of the mass.

    Its logit starts at -4, the others at N(0, 1); values are orthonormal and the loss is half the squared
    error of the output against that key's value, sum_j a_j^2 / 2 with a - 1 for the key. The rate is the
    one of a grid that needs the fewest steps on average; a draw that never gets there, or whose steps are
    too large, counts as the limit.
    """
    # Mechanisms without a formula take far longer: half of the draws, every other rate.
    draws, grid = (DRAWS, RATES) if candidate.formula is not None else (DRAWS // 2, RATES[1::2])
    start = normals(23, torch.float32)(DRAWS, KEYS)[:draws]
    start[:, 0] = START
    logits = start.repeat(len(grid), 1)
    rates = torch.tensor(grid, dtype=torch.float32).repeat_interleave(draws)[:, None]
    target = torch.eye(KEYS, dtype=torch.float32)[0]
    steps = torch.full((len(logits),), LIMIT)
    weigh, failed = candidate.row(width=KEYS), torch.zeros(len(logits), dtype=torch.bool)
    for step in range(LIMIT):
        (still,) = (~failed & (steps == LIMIT)).nonzero(as_tuple=True)
        if not len(still) or bool((steps.view(len(grid), draws) < LIMIT).all(1).any()):
            break
        x = logits[still].requires_grad_()
        weights = weigh(x)
        mass = weights.detach().abs().sum(-1)
        holds = (weights.detach()[:, 0] >= 0.5 * mass) & (mass > 0)
        steps[still[holds]] = step
        if not weights.requires_grad:
            break
        (slope,) = torch.autograd.grad((weights - target).square().sum() / 2, x)
        if not slope.any():
            break  # nothing will ever move
        change = rates[still] * slope.nan_to_num(nan=torch.inf)
        failed[still] = (change.abs().amax(-1) > _STRIDE) & ~holds
        logits[still] = logits[still] - change
    table = steps.view(len(grid), draws).double()
    best = int(table.mean(1).argmin())
    return [{"draw": k, "rate": grid[best], "steps": int(x)} for k, x in enumerate(table[best])]


def steps(results: Results, label: str) -> Estimate | None:
    rows = results.get("learning", label)
    return censored_mean([row["steps"] for row in rows], LIMIT) if rows else None


def parts(results: Results) -> Iterator[Part]:
    rows = []
    for label in results.labels:
        if own := results.get("learning", label):
            mean = censored_mean([row["steps"] for row in own], LIMIT)
            rows.append((label, mean.value, str(mean), own[0]["rate"] if mean.value < LIMIT else None))
    if rows:
        text = (
            f"Gradient descent on the {KEYS} logits of a row; one starts at {START:g} and should hold half of"
            f" the mass. The best of {len(RATES)} learning rates, {DRAWS} draws, at most {LIMIT} steps."
        )
        titles = ("mechanism", "steps", "interval", "best rate")
        yield Part.table("Steps until a key that starts at −4 is found", text, titles, rows)


def _needed(results: Results, label: str) -> list[float]:
    return [max(float(row["steps"]), 1.0) for row in results.rows("learning", label)]


@claim(
    SURVEY,
    EXPERIMENT,
    "Softmax's tiny weights give tiny gradients, so what was ignored is hard to learn.",
    refuted="softmax needs no more steps than cog.",
)
def _hard_to_learn(results: Results) -> Finding:
    """Eight draws, each mechanism at its best rate, steps compared draw by draw: supported if softmax needs
    more than 4 times as many steps as cog, by the lower end of the interval; partly if more at all.
    """
    softmax, cog = _needed(results, "softmax"), _needed(results, "cog")
    ratio = paired_ratio(softmax, cog)
    low = ratio.lower
    return grade(low > 4, low > 1), (
        f"at the best learning rate softmax needs {t_interval(softmax)} steps, cog {t_interval(cog)}: {ratio}"
        f" times as many"
    )


@claim(
    SURVEY,
    EXPERIMENT,
    "GPAM's second map cures the vanishing gradient of softmax.",
    refuted="softmax needs no more steps than gpam.",
)
def _gpam_gradient(results: Results) -> Finding:
    """The same draws: supported if softmax needs more than twice as many steps as gpam, by the lower end of
    the interval; partly if more at all.
    """
    gpam = _needed(results, "gpam")
    softmax = _needed(results, "softmax")[: len(gpam)]  # the same draws
    ratio = paired_ratio(softmax, gpam)
    low = ratio.lower
    return grade(low > 2, low > 1), (
        f"at the best learning rate softmax needs {t_interval(softmax)} steps, gpam {t_interval(gpam)}:"
        f" {ratio} times as many"
    )


SECTION = Section(
    name="learning",
    order=36,
    title="Learning",
    question="Can it learn to look at what it ignored?",
    jobs=jobs,
    parts=parts,
    columns=[
        ScoreColumn(
            "learns",
            "learns from logit −4?",
            "gradient steps until a key that starts at logit −4 holds half of the mass, at the best"
            " learning rate",
            steps,
            14.0,
            LIMIT - 1e-9,
            low_is_good=True,
            unit="steps",
            why=(
                f"softmax needs about 28: yes up to half of that, partly if it gets there within {LIMIT}; no"
                " if it never does, as with an output of zeros, random weights and what is flat below 0."
            ),
            limit=LIMIT,
        )
    ],
    claims=[_hard_to_learn, _gpam_gradient],
)
