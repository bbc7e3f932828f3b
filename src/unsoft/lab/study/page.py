"""The page of a store: verdicts first, then for each task a table with confidence intervals and charts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from unsoft.files import write_csv, write_whole
from unsoft.lab.evidence import VERDICTS
from unsoft.lab.report.figure import Figure, by_mechanism, svg_and_png, vega_script
from unsoft.lab.report.look import in_order, looks, shown_at_first
from unsoft.lab.report.page import CHARTS, CHARTS_STYLE, HERE, number, page
from unsoft.lab.study.plan import Group, Study
from unsoft.lab.study.record import DONE, FAILED, Record
from unsoft.lab.study.rule import METHOD, edge_words, verdict, verdict_sentence
from unsoft.lab.study.summary import ResultSummary, current, summarise

PAGE = "index.html"
_COLUMNS = (
    ("mechanism", "mechanism", ""),
    ("score", "score", "mean over seeds, on the test, at the rate that validation chose"),
    ("interval", "95 % CI", "Student's t over seeds"),
    ("gain", "over softmax", "mean of the differences on the same seeds; positive is better"),
    ("gain_interval", "its 95 % CI", "Student's t over seeds"),
    ("seeds", "seeds", ""),
    ("rate", "rate", "chosen as described above the table; a better one may lie beyond an end of the sweep"),
    ("parameters", "parameters", ""),
    ("time", "ms per step", "including evaluations, on the machine of the study"),
    ("failed", "failed runs", ""),
)
_ENDS = ("low", "high")
_AROUND = 0.05
_Rows = Iterator[dict[str, Any]]
_RowsOf = Callable[[ResultSummary], _Rows]


def study_page(studies: Sequence[Study], records: Sequence[Record], library: str) -> str:
    """Return a self-contained HTML file; ``library`` is the script of Vega-Embed."""
    records = current(records)
    labels, sections = _sections(studies, records)
    figures = [figure for section in sections for figure in section["figures"]]
    done = [record for record in records if record.status == DONE]
    return page(
        Path(__file__).parent / "page.html",
        title="unsoft study: what mechanisms learn",
        styles=[CHARTS_STYLE, HERE / "comparison.css"],
        libraries=[library],
        scripts=[CHARTS],
        data={
            "looks": looks(labels),
            "shown": shown_at_first(labels),
            "figures": {figure.name: {"spec": figure.for_page(), "chips": True} for figure in figures},
        },
        method=METHOD,
        verdicts=list(filter(None, (_sentence(study, records) for study in studies))),
        claims=[_claim(study, records) for study in studies if study.rules],
        sections=sections,
        charts=len(figures),
        columns=[{"name": name, "title": title, "help": text} for name, title, text in _COLUMNS],
        counts={"runs": len(records), "done": len(done), "hours": sum(one.wall for one in records) / 3600},
        failures=[record for record in records if record.status == FAILED],
        machines=sorted({record.machine for record in done}),
        codes=sorted({record.code for record in done}),
        versions=sorted({f"{name} {text}" for record in done for name, text in record.versions.items()}),
        when=sorted(record.finished for record in done)[-1:],
    )


def write_report(studies: Sequence[Study], records: Sequence[Record], out: Path) -> dict[str, int]:
    """Write the page, its charts as PNG and SVG, and their numbers as CSV, into the folder ``out``."""
    records = current(records)
    text = study_page(studies, records, vega_script())
    for folder in (out, out / "data", out / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(out / PAGE, text.encode())
    count = 0
    for section in _sections(studies, records)[1]:
        if section["rows"]:
            write_csv(out / "data" / f"{section['id']}.csv", section["rows"])
        for figure in section["figures"]:
            write_csv(out / "data" / f"{figure.name}.csv", figure.rows)
            for kind, picture in svg_and_png(figure.for_file()).items():
                write_whole(out / "figures" / f"{figure.name}.{kind}", picture)
            count += 1
    return {"figures": count}


def _sections(studies: Sequence[Study], records: Sequence[Record]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the labels of all mechanisms in the order of their colours, and one section for each task.

    Mechanisms that rules are about come first: of many, a chart initially shows only the first.
    """
    summaries = summarise(records)
    known = list(dict.fromkeys(one.mechanism for one in summaries))
    judged = [rule.mechanism for study in studies for rule in study.rules]
    labels = in_order(known, own=[label for label in judged if label in known])
    sections = []
    for study in studies:
        for group in study.groups:
            runs = [one for one in records if (one.study, one.group) == (study.name, group.name)]
            failed = bool(runs) and all(record.status == FAILED for record in runs)
            sections.append(_section(study, group, summaries, labels) | {"failed": failed})
    return labels, sections


def _section(
    study: Study, group: Group, summaries: Sequence[ResultSummary], labels: Sequence[str]
) -> dict[str, Any]:
    planned = [variant.label for variant in group.variants]
    mine = [one for one in summaries if (one.study, one.group) == (study.name, group.name)]
    mine = [one for one in mine if one.mechanism in planned]
    finished = [one for one in mine if one.seeds]
    return {
        "id": section_id(study.name, group.name),
        "title": group.name if group.name == study.name else f"{study.name}: {group.name}",
        "knobs": ", ".join(f"{name} {value}" for name, value in group.knobs.items()),
        "sweep": mine[0].sweep_words if mine else "",
        "edges": edge_words(finished),
        "rows": [one.row() for one in finished],
        "figures": figures_of(finished, labels) if finished else [],
        "attention": {one.mechanism: _figures(one.attention) for one in finished if one.attention},
        "learned": {one.mechanism: _learned(one.learned) for one in finished if one.learned},
        "first": finished[0] if finished else None,
        "missing": [one.mechanism for one in mine if not one.seeds],
    }


def _learned(values: Mapping[str, tuple[float, float, float]]) -> str:
    """
    >>> _learned({"t": (2.0, 1.5, 2.5)})
    't 2 (1.5 to 2.5)'
    """
    return ", ".join(
        f"{name} {number(mean)} ({number(low)} to {number(high)})"
        for name, (mean, low, high) in values.items()
    )


def _figures(values: Mapping[str, float]) -> str:
    """
    >>> _figures({"first_token": 0.25})
    'first token 0.250'
    """
    return ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in values.items())


def _own(study: Study, records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.study == study.name]


def _sentence(study: Study, records: Sequence[Record]) -> str:
    return verdict_sentence(study.judged_by, _own(study, records), study.claim)


def _claim(study: Study, records: Sequence[Record]) -> dict[str, Any]:
    outcome, why = verdict(study.rules, _own(study, records))
    return {
        "place": section_id(study.name, study.rules[0].group),
        "source": study.source,
        "claim": study.claim,
        "limits": study.limits,
        "rules": [rule.text for rule in study.rules],
        "verdict": outcome,
        "mark": VERDICTS[outcome],
        "why": why,
    }


def section_id(study: str, group: str) -> str:
    """Return the name of the section and of the files about one group.

    >>> section_id("trust", "census without copies")
    'trust-census-without-copies'
    """
    return re.sub(r"[^\w.-]+", "-", f"{study}-{group}")


@dataclass(frozen=True, kw_only=True)
class _Chart:
    """A chart of a group: its rows have the columns x and score."""

    rows: Callable[[ResultSummary], _Rows]
    title: str
    note: str
    x_title: str = ""
    """Title of the x axis; "" for the knob that the rows name."""
    log_x: bool = False
    intervals: bool = False
    is_scatter: bool = False
    ticks_at_rows: bool = False

    def figure(self, group: Sequence[ResultSummary], labels: Sequence[str]) -> Figure | None:
        """Return the figure, or None if no summary has a row for it."""
        rows = [row for summary in group for row in self.rows(summary)]
        if not rows:
            return None
        first = group[0]
        chart = by_mechanism(
            labels,
            [] if self.is_scatter else rows,
            "x",
            "score",
            x_title=self.x_title or rows[0]["of"],
            y_title=f"{first.metric}, {'higher' if first.higher_is_better else 'lower'} is better",
            log_x=self.log_x and min(row["x"] for row in rows) > 0,
            ticks=sorted({row["x"] for row in rows}) if self.ticks_at_rows else (),
            dots=rows if self.is_scatter else None,
            ends=_ENDS if self.intervals else None,
            y_domain=_domain(rows),
        )
        name = f"{section_id(first.study, first.group)}-{self.rows.__name__.strip('_')}"
        note = self.note.format(sweep=first.sweep_words)
        return Figure(name, f"{first.group}: {self.title.lower()}", note, rows, chart)


_charts: list[_Chart] = []
_BARS = "bars are 95 % confidence intervals over seeds."


def _chart(title: str, note: str, **options: Any) -> Callable[[_RowsOf], _RowsOf]:
    """Decorate the rows of a chart, after which it is called; ``options`` are those of :class:`_Chart`."""

    def decorated(rows: _RowsOf) -> _RowsOf:
        _charts.append(_Chart(rows=rows, title=title, note=note, **options))
        return rows

    return decorated


def figures_of(group: Sequence[ResultSummary], labels: Sequence[str]) -> list[Figure]:
    """Return the charts of one group; ``labels`` are those of the page, in the order of their colours."""
    figures = [chart.figure(group, labels) for chart in _charts]
    return [figure for figure in figures if figure is not None]


def _domain(rows: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Return an axis around scores that are all equal, for which Vega draws no numbers; else None.

    >>> _domain([{"score": 0.5, "low": None}, {"score": 0.5}]), _domain([{"score": 0.5, "high": 0.6}])
    ((0.45, 0.55), None)
    """
    ends = {row[name] for row in rows for name in ("score", *_ENDS) if row.get(name) is not None}
    return (min(ends) - _AROUND, max(ends) + _AROUND) if len(ends) == 1 else None


@_chart("Learning curves", "Mean over seeds at the chosen rate ({sweep}).", x_title="step")
def _curves(summary: ResultSummary) -> _Rows:
    by_step: dict[float, list[float]] = {}
    for run in summary.runs:
        for step, score in run.curve:
            by_step.setdefault(step, []).append(score)
    for step, scores in by_step.items():
        yield {"mechanism": summary.mechanism, "x": step, "score": fmean(scores)}


@_chart(
    "Score by learning rate",
    "On validation examples; {sweep}.",
    x_title="learning rate",
    log_x=True,
    ticks_at_rows=True,
)
def _rates(summary: ResultSummary) -> _Rows:
    """Yield rows only for sweeps over nothing but the rate: a line would join points that differ in more."""
    for point, score in summary.rates.items():
        if re.fullmatch(r"lr=[^,=]+", point) and len(summary.rates) > 1:
            yield {"mechanism": summary.mechanism, "x": float(point[3:]), "score": score}


@_chart("Score by difficulty", f"On the test; {_BARS}", log_x=True, intervals=True)
def _difficulty(summary: ResultSummary) -> _Rows:
    """Yield tests that differ in one knob."""
    for label, (mean, low, high) in summary.harder.items():
        knob, _, value = label.partition("=")
        if re.fullmatch(r"[\d.]+", value):
            score = {"score": mean, "low": low, "high": high}
            yield {"mechanism": summary.mechanism, "x": float(value), "of": knob, **score}


@_chart(
    "Score against cost",
    f"On the test, by the time of a step; {_BARS}",
    x_title="ms per step",
    intervals=True,
    is_scatter=True,
)
def _cost(summary: ResultSummary) -> _Rows:
    if summary.mean is not None and summary.seconds_per_step is not None:
        yield {
            "mechanism": summary.mechanism,
            "x": 1e3 * summary.seconds_per_step,
            "parameters": summary.parameters,
            "score": summary.mean,
            "low": summary.low,
            "high": summary.high,
        }
