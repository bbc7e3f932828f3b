"""Summaries of a study: for each task and mechanism the mean score with its confidence interval, and the
difference to softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

from unsoft.lab.evidence import Estimate, between, t_interval
from unsoft.lab.study.record import DONE, FAILED, NONE, SHORT, Record, sweep_words
from unsoft.notebook import data_frame, html_table

CONTROL = "softmax"
SCORE = "score"
_BITS = "bits per byte"
"""The metric of language models, whose ``known`` score is that of trigrams."""
_SAME_IN_ALL_RUNS = (
    *("task", "metric", "higher_is_better", "sweep", "choose_on", "parameters"),
    *("chance", "known", "shortcut"),
)
STATISTICS = {
    "first_token": 1.0,
    "first_token_at_rest": 1.0,
    "head_diversity": 2.0,
    "pruned_score": 1.0,
    "perturbed_score": 1.0,
}
"""Statistics of attention that runs record, with the largest value of each; the smallest is 0."""


@dataclass(frozen=True)
class Difference:
    """Paired difference of two mechanisms on the seeds both have; positive is better for every metric."""

    mean: float
    low: float | None
    high: float | None
    seeds: int


def possible_values(on: str, metric: str, *, higher_is_better: bool) -> tuple[float, float]:
    """Return the smallest and the largest value that a score or a statistic of attention can have.

    >>> possible_values("score", "accuracy", higher_is_better=True)
    (0.0, 1.0)
    >>> possible_values("score", "relative error", higher_is_better=False)
    (0.0, inf)
    """
    if on in STATISTICS:
        return 0.0, STATISTICS[on]
    if metric == "accuracy":
        return 0.0, 1.0
    return (-math.inf if higher_is_better else 0.0), math.inf


@dataclass(frozen=True, kw_only=True)
class ResultSummary:
    """A mechanism on a task, at the learning rate that validation chose."""

    study: str
    group: str
    task: str
    mechanism: str
    metric: str
    higher_is_better: bool
    seeds: int
    """Finished runs at the chosen rate."""
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    lr: float | None = None
    point: str = ""
    """The point of the sweep that was chosen, such as "lr=0.003"."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Mean validation score of every point of the sweep, by which one was chosen."""
    sweep: str = ""
    choose_on: str = ""
    """The difficulty of these validation examples, such as "crowd=128"; "" for that of training."""
    edge: str = ""
    """ "largest" or "smallest" if the chosen rate is an end of the sweep: a better one may lie beyond it."""
    difference: Difference | None = None
    """Difference to plain softmax; None for softmax itself."""
    parameters: int | None = None
    seconds_per_step: float | None = None
    chance: float | None = None
    known: float | None = None
    shortcut: float | None = None
    harder: Mapping[str, Estimate] = field(default_factory=dict)
    """Mean and confidence interval on harder tests."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """Statistics of the final attention, mean over seeds and layers."""
    learned: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Mean, smallest and largest of the mechanism's own parameters, over seeds, layers and heads."""
    failed: int = 0
    runs: Sequence[Record] = ()
    """The runs at the chosen rate."""

    @property
    def is_undertrained(self) -> bool:
        """True for a language model that is not better than trigrams of the training text."""
        return self.metric == _BITS and (self.mean or 0.0) >= (self.known or math.inf)

    @property
    def sweep_words(self) -> str:
        """Description of how the learning rate was chosen."""
        return sweep_words(self.sweep, self.choose_on)

    @property
    def rate_words(self) -> str:
        """The chosen point, with a note if it is an end of the sweep."""
        return self.point.removeprefix("lr=") + (f" ({self.edge} tried)" if self.edge else "")

    def row(self) -> dict[str, Any]:
        """Return a row of the table on the page and in the terminal."""
        gain = self.difference
        return {
            "mechanism": self.mechanism,
            "score": self.mean,
            "interval": between(self.low, self.high),
            "gain": None if gain is None else gain.mean,
            "gain_interval": "" if gain is None else between(gain.low, gain.high),
            "seeds": self.seeds,
            "rate": self.rate_words,
            "parameters": self.parameters,
            "time": None if self.seconds_per_step is None else 1e3 * self.seconds_per_step,
            "failed": self.failed,
        }


class Summaries(list[ResultSummary]):
    """Results of a study, with a table for notebooks and a chart."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the table, each with its task."""
        return [{"task": one.task, **one.row()} for one in self]

    def to_pandas(self) -> Any:
        """Return the table as a DataFrame."""
        return data_frame(self.rows())

    def plot(self) -> Any:
        """Return an Altair chart of the scores with their confidence intervals, one panel per task."""
        import altair

        rows = [
            {"task": s.task, "mechanism": s.mechanism, "score": s.mean, "low": s.low, "high": s.high}
            for s in self
        ]
        data = altair.Data(values=rows)  # type: ignore[no-untyped-call]
        base = altair.Chart(data).encode(y="mechanism:N")
        bars = base.mark_rule().encode(x="low:Q", x2="high:Q")
        points = base.mark_point(filled=True).encode(x=altair.X("score:Q", scale=altair.Scale(zero=False)))
        return altair.layer(bars, points).facet("task:N")

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def summarise(records: Iterable[Record], control: str = CONTROL) -> Summaries:
    """Return one summary for each study, group and mechanism, in the order of the plan.

    >>> from unsoft.lab.study.record import Record
    >>> runs = [
    ...     Record(study="s", group="g", task="copy", mechanism=name, key=f"{name}{seed}", seed=seed, lr=0.1,
    ...            point="lr=0.1", status="done", score=score + seed / 100, validation=score)
    ...     for name, score in (("softmax", 0.5), ("cog", 0.75)) for seed in range(5)
    ... ]
    >>> softmax, cog = summarise(runs)
    >>> round(softmax.mean, 3), softmax.difference, round(cog.difference.mean, 3)
    (0.52, None, 0.25)
    """
    parts: dict[tuple[str, str, str], list[Record]] = {}
    for record in current(records):
        parts.setdefault((record.study, record.group, record.mechanism), []).append(record)
    controls = {key[:2]: chosen_runs(runs) for key, runs in parts.items() if key[2] == control}
    return Summaries(
        _summary(key, runs, [] if key[2] == control else controls.get(key[:2], []))
        for key, runs in parts.items()
    )


def current(records: Iterable[Record]) -> list[Record]:
    """Return the latest record of each run: a run is planned again when its key changes."""
    latest: dict[tuple[object, ...], Record] = {}
    for record in records:
        run = (record.study, record.group, record.mechanism, record.seed, record.point)
        latest.pop(run, None)
        latest[run] = record
    return list(latest.values())


def best_point(runs: Sequence[Record]) -> str | None:
    """Return the point of the sweep with the best validation score, :attr:`Record.merit`, on the seeds of the
    sweep; None while runs are missing.

    A point at which a run failed counts only if there is no other. Among equals, the one that learned earlier
    wins, then the smaller rate. Without a sweep there is one point only.
    """
    swept = [run for run in runs if run.swept] or list(runs)
    points = list(dict.fromkeys(run.point for run in swept))
    if any(run.status not in (DONE, FAILED) for run in swept):
        return None
    whole = [p for p in points if all(run.status == DONE for run in swept if run.point == p)]
    some = [p for p in points if any(run.status == DONE for run in swept if run.point == p)]

    def merit(point: str) -> tuple[float, float, float]:
        mine = [run for run in swept if run.point == point and run.status == DONE]
        sign = 1.0 if mine[0].higher_is_better else -1.0
        early = [fmean(score for _, score in run.curve) for run in mine if run.curve]
        return sign * fmean(map(_merit, mine)), sign * fmean(early) if early else 0.0, -mine[0].lr

    return max(whole or some, key=merit, default=None)


def _merit(run: Record) -> float:
    if run.merit is None:
        where = f" with {run.choose_on}, by which rates are to be chosen" if run.choose_on else ""
        raise ValueError(f"study: {run.label} has no validation score{where}")
    return run.merit


def chosen_runs(runs: Sequence[Record]) -> list[Record]:
    """Return the finished runs at the chosen point, by seed; none while the sweep is incomplete."""
    point = best_point(runs)
    done = [run for run in runs if run.point == point and run.status == DONE and not _is_short(run)]
    return sorted(done, key=lambda run: run.seed)


def _is_short(run: Record) -> bool:
    """Return True for a run that only chooses a rate, since it is shorter than the others."""
    return run.swept and run.sweep == SHORT


def difference(mine: Sequence[Record], theirs: Sequence[Record], on: str = SCORE) -> Difference | None:
    """Return how much better the first runs are, paired over seeds; None if they share no seed."""
    other = {run.seed: value_of(run, on) for run in theirs}
    pairs = [(value_of(run, on), other.get(run.seed)) for run in mine]
    # More of a statistic is positive, whatever the direction of the metric.
    sign = 1.0 if on in STATISTICS or all(run.higher_is_better for run in mine) else -1.0
    gains = [sign * (a - b) for a, b in pairs if a is not None and b is not None]
    if not gains:
        return None
    smallest, largest = _possible(mine[0], on)
    gain = t_interval(gains, (smallest - largest, largest - smallest))
    return Difference(gain.value, gain.low, gain.high, len(gains))


def room_above(baseline: ResultSummary, on: str = SCORE) -> float | None:
    """Return how much better than ``baseline`` any mechanism could be; None if that is not known.

    The best accuracy is 1, the best of a statistic its largest value, the best error that of the known
    solution, or 0. Of a language model that is 0 too: the trigrams it is compared with are a weak reference.
    """
    values = [value for run in baseline.runs if (value := value_of(run, on)) is not None]
    if not values:
        return None
    smallest, largest = _possible(baseline.runs[0], on)
    if on in STATISTICS or baseline.higher_is_better:
        best = baseline.known if math.isinf(largest) else largest
        return None if best is None else best - fmean(values)
    known = None if baseline.metric == _BITS else baseline.known
    return fmean(values) - (smallest if known is None else known)


def value_of(run: Record, on: str) -> float | None:
    """Return what a rule judges in one run: the score, that of a harder test, or a mean over layers."""
    if on in STATISTICS:
        return fmean(run.attention[on]) if run.attention.get(on) else None
    return run.score if on == SCORE else run.harder.get(on)


def _possible(run: Record, on: str) -> tuple[float, float]:
    return possible_values(on, run.metric, higher_is_better=run.higher_is_better)


def _summary(key: tuple[str, str, str], runs: Sequence[Record], control: Sequence[Record]) -> ResultSummary:
    study, group, mechanism = key
    chosen = chosen_runs(runs)
    first = chosen[0] if chosen else runs[0]
    scores = [run.score for run in chosen if run.score is not None]
    mean, low, high = t_interval(scores, _possible(first, SCORE)) if scores else (None, None, None)
    times = [run.seconds_per_step for run in chosen if run.seconds_per_step is not None]
    harder = _by_name(item for run in chosen for item in run.harder.items())
    layers = _by_name(item for run in chosen for item in run.attention.items() if item[1])
    merits = _by_name(
        (run.point, run.merit) for run in runs if (run.swept or run.sweep == NONE) and run.merit is not None
    )
    return ResultSummary(
        study=study,
        group=group,
        mechanism=mechanism,
        **{name: getattr(first, name) for name in _SAME_IN_ALL_RUNS},
        seeds=len(scores),
        mean=mean,
        low=low,
        high=high,
        lr=first.lr if chosen else None,
        point=first.point if chosen else "",
        rates={point: fmean(values) for point, values in merits.items()},
        edge=_edge(runs, chosen),
        difference=difference(chosen, control) if control else None,
        seconds_per_step=fmean(times) if times else None,
        harder={label: t_interval(values, _possible(first, label)) for label, values in harder.items()},
        attention={name: fmean(map(fmean, values)) for name, values in layers.items()},
        learned=_learned(chosen),
        failed=sum(run.status == FAILED for run in runs),
        runs=chosen,
    )


_Value = TypeVar("_Value")


def _by_name(items: Iterable[tuple[str, _Value]]) -> dict[str, list[_Value]]:
    values: dict[str, list[_Value]] = {}
    for name, value in items:
        values.setdefault(name, []).append(value)
    return values


def _edge(runs: Sequence[Record], chosen: Sequence[Record]) -> str:
    rates = {run.lr for run in runs}
    if len(rates) == 1 or not chosen:
        return ""
    return {max(rates): "largest", min(rates): "smallest"}.get(chosen[0].lr, "")


def _learned(runs: Sequence[Record]) -> dict[str, tuple[float, float, float]]:
    """Return mean and range by short name; a parameter learned as a logarithm is shown as itself."""
    every = ((name.rpartition(".")[2], x) for run in runs for name, own in run.learned.items() for x in own)
    learned = _by_name(
        (name.removeprefix("log_"), math.exp(x) if name.startswith("log_") else x) for name, x in every
    )
    return {name: (fmean(values), min(values), max(values)) for name, values in learned.items()}
