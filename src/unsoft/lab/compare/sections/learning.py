"""Learning from a low logit: gradient steps until a key holds half of the mass."""

from __future__ import annotations

from functools import partial

import torch

from unsoft.lab.compare.candidate import Candidate, normals
from unsoft.lab.compare.jobs import Job, Results, Rows
from unsoft.lab.compare.section import SIGNED, SURVEY, Finding, Request, Section, job
from unsoft.lab.evidence import censored_mean, grade, paired_ratio, t_interval

KEYS, START, LIMIT, DRAWS = 16, -4.0, 100, 8
RATES = tuple(2.0**k for k in range(11))
STRIDES = (8.0, 4.0, 2.0, 1.0)
"""A rate is too large if a step moves a logit by more than this; the first is the way from -4 to 4."""


SECTION = Section(order=36, group=SIGNED, question="Can it learn to look at what it ignored?")


@SECTION.facts
def _facts(request: Request) -> list[Job]:
    return [job("learning by stride", Candidate(x, x), by_stride, 1.0) for x in ("softmax", "cog")]


def by_stride(candidate: Candidate) -> Rows:
    """Count the steps for every stride, with a limit that the smallest allows for."""
    return [
        {"stride": stride} | row
        for stride in STRIDES
        for row in learning(candidate, stride, limit=LIMIT * round(STRIDES[0] / stride))
    ]


@SECTION.each(0.5, "softmax", "cog", "gpam")
def learning(candidate: Candidate, stride: float = STRIDES[0], limit: int = LIMIT) -> Rows:
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
    steps = torch.full((len(logits),), limit)
    weigh, failed = candidate.row(width=KEYS), torch.zeros(len(logits), dtype=torch.bool)
    for step in range(limit):
        (still,) = (~failed & (steps == limit)).nonzero(as_tuple=True)
        if not len(still) or bool((steps.view(len(grid), draws) < limit).all(1).any()):
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
        failed[still] = (change.abs().amax(-1) > stride) & ~holds
        logits[still] = logits[still] - change
    table = steps.view(len(grid), draws).double()
    best = int(table.mean(1).argmin())
    return [{"draw": k, "rate": grid[best], "steps": int(x)} for k, x in enumerate(table[best])]


@SECTION.column(
    "learns",
    "learning from logit −4",
    yes=14.0,
    partly=LIMIT - 1e-9,
    low_is_good=True,
    limit=LIMIT,
    margin=1.0,
    unit="steps",
    need="learn a key that was ignored",
)
def _steps(results: Results, label: str) -> list[float]:
    """Gradient steps until a key that starts at logit −4 holds half of the mass, at the best learning rate.

    Softmax needs about 28: yes up to half of that, partly if it gets there within 100; no if it never does,
    as with an output of zeros, random weights and what is flat below 0.
    """
    return [float(row["steps"]) for row in results.get("learning", label)]


@SECTION.table("Steps until a key that starts at −4 is found", "mechanism", "steps", "interval", "best rate")
def _table(results: Results) -> Rows:
    """Gradient descent on the 16 logits of a row; one starts at −4 and should hold half of the mass.

    The best of 11 learning rates, 8 draws, at most 100 steps.
    """
    rows = []
    for label in results.labels:
        if own := results.get("learning", label):
            mean = censored_mean([row["steps"] for row in own], LIMIT)
            rows.append((label, mean.value, str(mean), own[0]["rate"] if mean.value < LIMIT else None))
    return rows


def _needed(results: Results, label: str, name: str = "learning", **where: float) -> list[float]:
    return [max(float(row["steps"]), 1.0) for row in results.rows(name, label, **where)]


@SECTION.experiment(
    SURVEY, "Softmax's tiny weights give tiny gradients, so what was ignored is hard to learn."
)
def _hard_to_learn(results: Results) -> Finding:
    """Eight draws, each mechanism at its best rate among those whose steps move no logit by more than 8,
    4, 2 or 1, steps compared draw by draw: supported if softmax needs more than 4 times as many steps as
    cog at each of the four limits, by the lower end of the interval; partly if more at all at each.

    Refuted: softmax needs no more steps than cog at one of the four limits.
    """
    needed = partial(_needed, results, name="learning by stride")
    ratios = {
        stride: paired_ratio(needed("softmax", stride=stride), needed("cog", stride=stride))
        for stride in STRIDES
    }
    least = min(ratio.lower for ratio in ratios.values())
    each = (f"{ratio} if a step moves a logit by at most {stride:g}" for stride, ratio in ratios.items())
    return grade(least > 4, least > 1), (
        "softmax needs this many times the steps of cog, each at its best learning rate: " + ", ".join(each)
    )


@SECTION.experiment(SURVEY, "GPAM's second map cures the vanishing gradient of softmax.")
def _gpam_gradient(results: Results) -> Finding:
    """The same draws: supported if softmax needs more than twice as many steps as gpam, by the lower end
    of the interval; partly if more at all.

    Refuted: softmax needs no more steps than gpam.
    """
    gpam = _needed(results, "gpam")
    softmax = _needed(results, "softmax")[: len(gpam)]  # the same draws
    ratio = paired_ratio(softmax, gpam)
    low = ratio.lower
    return grade(low > 2, low > 1), (
        f"at the best learning rate softmax needs {t_interval(softmax)} steps, gpam {t_interval(gpam)}:"
        f" {ratio} times as many"
    )
