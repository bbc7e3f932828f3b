"""The charts of a study: learning curves, scores by rate, by difficulty and by cost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from unsoft.lab.report.figure import Figure, by_mechanism
from unsoft.lab.study.summary import Summary

_ENDS = ("low", "high")
_AROUND = 0.05


def place_of(study: str, group: str) -> str:
    """What files and a part of the page are called that are about one group.

    >>> place_of("trust", "census without copies")
    'trust-census-without-copies'
    """
    return re.sub(r"[^\w.-]+", "-", f"{study}-{group}")


def figures_of(group: Sequence[Summary], labels: Sequence[str]) -> list[Figure]:
    """Of the mechanisms of one group; ``labels`` are those of the page, in the order of their colours."""
    name, metric = group[0].group, group[0].metric
    better = f"{metric}, {'higher' if group[0].higher_is_better else 'lower'} is better"
    prefix = place_of(group[0].study, name)
    words = group[0].sweep_words
    made = [
        (
            "curves",
            "Learning curves",
            f"Mean over seeds at the chosen rate ({words}).",
            _curves,
            "step",
            False,
            False,
        ),
        (
            "rates",
            "Score by learning rate",
            f"On validation examples; {words}.",
            _rates,
            "learning rate",
            True,
            False,
        ),
        (
            "difficulty",
            "Score by difficulty",
            "On the test; bars are 95 % intervals over seeds.",
            _difficulty,
            "",
            True,
            True,
        ),
        (
            "cost",
            "Score against cost",
            "On the test, by the time of a step; bars are 95 % intervals over seeds.",
            _cost,
            "ms per step",
            False,
            True,
        ),
    ]
    found = []
    for kind, title, note, rows_of, x_title, log_x, bars in made:
        rows = [row for summary in group for row in rows_of(summary)]
        if not rows:
            continue
        chart = by_mechanism(
            labels,
            [] if kind == "cost" else rows,
            "x",
            "score",
            x_title=x_title or rows[0]["of"],
            y_title=better,
            log_x=log_x and min(row["x"] for row in rows) > 0,
            ticks=sorted({row["x"] for row in rows}) if kind == "rates" else (),
            dots=rows if kind == "cost" else None,
            ends=_ENDS if bars else None,
            y_domain=_domain(rows),
        )
        found.append(Figure(f"{prefix}-{kind}", f"{name}: {title.lower()}", note, rows, chart))
    return found


def _domain(rows: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Around scores that are all the same, for which Vega has no axis with numbers; else its own choice.

    >>> _domain([{"score": 0.5, "low": None}, {"score": 0.5}]), _domain([{"score": 0.5, "high": 0.6}])
    ((0.45, 0.55), None)
    """
    ends = {row[name] for row in rows for name in ("score", *_ENDS) if row.get(name) is not None}
    return (min(ends) - _AROUND, max(ends) + _AROUND) if len(ends) == 1 else None


def _curves(summary: Summary) -> Iterator[dict[str, Any]]:
    by_step: dict[float, list[float]] = {}
    for run in summary.runs:
        for step, score in run.curve:
            by_step.setdefault(step, []).append(score)
    for step, scores in by_step.items():
        yield {"mechanism": summary.mechanism, "x": step, "score": fmean(scores)}


def _rates(summary: Summary) -> Iterator[dict[str, Any]]:
    """Only of sweeps over nothing but the rate: a line would join places that differ in more."""
    for point, score in summary.rates.items():
        if re.fullmatch(r"lr=[^,=]+", point) and len(summary.rates) > 1:
            yield {"mechanism": summary.mechanism, "x": float(point[3:]), "score": score}


def _difficulty(summary: Summary) -> Iterator[dict[str, Any]]:
    """Tests that differ in one knob."""
    for label, (mean, low, high) in summary.harder.items():
        knob, _, value = label.partition("=")
        if re.fullmatch(r"[\d.]+", value):
            yield {
                "mechanism": summary.mechanism,
                "x": float(value),
                "of": knob,
                "score": mean,
                "low": low,
                "high": high,
            }


def _cost(summary: Summary) -> Iterator[dict[str, Any]]:
    if summary.mean is not None and summary.seconds_per_step is not None:
        yield {
            "mechanism": summary.mechanism,
            "x": 1e3 * summary.seconds_per_step,
            "parameters": summary.parameters,
            "score": summary.mean,
            "low": summary.low,
            "high": summary.high,
        }
