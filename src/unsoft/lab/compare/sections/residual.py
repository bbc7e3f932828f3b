"""Rate of collapse: the residual after one layer against the residual before it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from unsoft import measure
from unsoft.lab.compare.candidate import Candidate, normals
from unsoft.lab.compare.jobs import Job, Results, Rows, matching
from unsoft.lab.compare.section import (
    DEEP,
    EXPERIMENT,
    SURVEY,
    THEOREM,
    Finding,
    Request,
    Section,
    claim,
    job,
)
from unsoft.lab.evidence import Estimate, grade, paired_ratio, t_interval
from unsoft.lab.report.figure import Figure, by_mechanism

MECHANISMS = ("softmax", "gpam")
SIZES = tuple(10.0**-k for k in range(4))
TOKENS, WIDTH = 48, 64


def facts(request: Request) -> list[Job]:
    return [job("residual", None, residual, 0.3, draws=request.level.draws)]


def residual(draws: int) -> Rows:
    """Measure |res(A X)| for X = 1 m + size R, bidirectional, with the same R for every mechanism."""
    rows = []
    for draw in range(draws):
        normal = normals(700 + draw)
        mean, around = normal(1, 1, WIDTH), normal(1, TOKENS, WIDTH)
        maps = normal(2, WIDTH, WIDTH) / math.sqrt(WIDTH)
        for size in SIZES:
            states = mean + size * around
            for name in MECHANISMS:
                with torch.no_grad():
                    weights = Candidate(name, name).weights(states @ maps[0], states @ maps[1])
                after = float(measure.residual(weights @ states))
                before = float(measure.residual(states))
                rows.append({"mechanism": name, "size": size, "draw": draw, "before": before, "after": after})
    return rows


def slopes(rows: Rows, name: str) -> Estimate:
    """Return d log(after) / d log(before) between the two smallest sizes, over draws."""
    small, large = (matching(rows, mechanism=name, size=s) for s in sorted({row["size"] for row in rows})[:2])
    return t_interval(
        [
            math.log(b["after"] / a["after"]) / math.log(b["before"] / a["before"])
            for a, b in zip(small, large, strict=True)
        ]
    )


def figures(results: Results) -> Iterator[Figure]:
    rows = results.get("residual")
    if rows:
        shown = matching(rows, draw=0)
        chart = by_mechanism(
            [label for label in results.labels if label in MECHANISMS],
            [row for row in shown if row["mechanism"] in results.labels],
            "before",
            "after",
            x_title="residual before",
            y_title="residual after one layer",
            log_x=True,
            log_y=True,
        )
        yield Figure(
            "residual", "How fast tokens collapse", "A slope of 3 in this picture is cubic.", shown, chart
        )


@claim(SURVEY, THEOREM, "The residual falls at a cubic rate, under GPAM still.")
def _cubic_collapse(results: Results) -> Finding:
    """Slopes of log residuals at sizes 0.01 and 0.001 lie within 0.05 of 3 for softmax and gpam."""
    rows = results.rows("residual")
    powers = {name: slopes(rows, name) for name in MECHANISMS}
    return grade(all(abs(one.value - 3) < 0.05 for one in powers.values())), (
        "slope of the residual after a layer against that before it, both small: "
        + ", ".join(f"{name} {one}" for name, one in powers.items())
    )


@claim(SURVEY, EXPERIMENT, "GPAM's representations collapse more slowly than softmax's.")
def _slower_collapse(results: Results) -> Finding:
    """Paired by draw, one bidirectional layer: supported if gpam's residual is more than 5 % larger at
    each of four sizes, by the lower end of the interval; partly if at some.

    Refuted: At no size is it 5 % larger.
    """
    rows = results.rows("residual")
    ratios = {
        size: paired_ratio(
            *([r["after"] for r in matching(rows, mechanism=name, size=size)] for name in ("gpam", "softmax"))
        )
        for size in SIZES
    }
    above = [one.lower > 1.05 for one in ratios.values()]
    sizes = ", ".join(f"{one} at size {size:g}" for size, one in ratios.items())
    return grade(all(above), any(above)), (
        f"residual after one bidirectional layer, gpam over softmax, draw by draw: {sizes}; both fall with"
        f" the powers {slopes(rows, 'gpam').value:.2f} and {slopes(rows, 'softmax').value:.2f} of the"
        " residual before"
    )


SECTION = Section(
    name="residual",
    order=42,
    group=DEEP,
    about_mechanisms=("gpam",),
    title="Residual",
    question="How fast do tokens become the same?",
    about="Tokens that differ little: how little do they differ after one layer of attention without a mask?",
    facts=facts,
    figures=figures,
    claims=[_cubic_collapse, _slower_collapse],
)
