"""The page of a store: verdicts first, then for each task a table with intervals and the charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsoft.files import write_csv, write_whole
from unsoft.lab.evidence import DOES_NOT_HOLD, HOLDS, UNDECIDED
from unsoft.lab.report.figure import svg_and_png, vega_script
from unsoft.lab.report.look import in_order, looks, shown_at_first
from unsoft.lab.report.page import CHARTS, CHARTS_STYLE, HERE, number, page
from unsoft.lab.study.figures import figures_of, place_of
from unsoft.lab.study.plan import Study
from unsoft.lab.study.record import DONE, FAILED, Record
from unsoft.lab.study.rule import edge_words, verdict
from unsoft.lab.study.summary import Summary, current, summarise

PAGE = "index.html"
_MARKS = {HOLDS: "yes", UNDECIDED: "partly", DOES_NOT_HOLD: "no"}
_COLUMNS = (
    ("mechanism", "mechanism", ""),
    ("score", "score", "mean over seeds, on the test, at the rate that validation chose"),
    ("interval", "95 % interval", "bootstrap over seeds"),
    ("gain", "over softmax", "mean of the differences on the same seeds; positive is better"),
    ("gain_interval", "its interval", "bootstrap over seeds"),
    ("seeds", "seeds", ""),
    (
        "rate",
        "rate",
        "how it was chosen stands above the table; beyond an end of the sweep may be a better one",
    ),
    ("parameters", "parameters", ""),
    ("time", "ms per step", "with looks at the score, on the machine of the study"),
    ("failed", "failed runs", ""),
)


def study_page(studies: Sequence[Study], records: Sequence[Record], library: str) -> str:
    """The text of an HTML file that needs nothing else; ``library`` is the script of Vega-Embed."""
    records = current(records)
    summaries = summarise(records)
    labels = _labels(studies, summaries)
    sections = [_section(study, group.name, summaries, labels) for study in studies for group in study.groups]
    for section in sections:
        runs = [record for record in records if place_of(record.study, record.group) == section["id"]]
        section["failed"] = bool(runs) and all(record.status == FAILED for record in runs)
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
        claims=[_claim(study, records) for study in studies if study.rules],
        sections=sections,
        charts=len(figures),
        columns=[{"name": name, "title": title, "help": text} for name, title, text in _COLUMNS],
        counts={
            "runs": len(records),
            "done": len(done),
            "hours": sum(record.wall for record in records) / 3600,
        },
        failures=[record for record in records if record.status == FAILED],
        machines=sorted({record.machine for record in done}),
        codes=sorted({record.code for record in done}),
        versions=sorted({f"{name} {text}" for record in done for name, text in record.versions.items()}),
        when=sorted(record.finished for record in done)[-1:],
    )


def write_report(studies: Sequence[Study], records: Sequence[Record], out: Path) -> dict[str, int]:
    """The page, its charts as PNG and SVG, and their numbers as CSV, into the folder ``out``."""
    summaries = summarise(records)
    labels = _labels(studies, summaries)
    text = study_page(studies, records, vega_script())
    for folder in (out, out / "data", out / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(out / PAGE, text.encode())
    count = 0
    for study in studies:
        for group in study.groups:
            section = _section(study, group.name, summaries, labels)
            if section["rows"]:
                write_csv(out / "data" / f"{section['id']}.csv", section["rows"])
            for figure in section["figures"]:
                write_csv(out / "data" / f"{figure.name}.csv", figure.rows)
                for kind, picture in svg_and_png(figure.for_file()).items():
                    write_whole(out / "figures" / f"{figure.name}.{kind}", picture)
                count += 1
    return {"figures": count}


def _labels(studies: Sequence[Study], summaries: Sequence[Summary]) -> list[str]:
    """Mechanisms that rules are about come first: of many, only the first are shown until one chooses."""
    there = list(dict.fromkeys(one.mechanism for one in summaries))
    judged = [rule.mechanism for study in studies for rule in study.rules]
    return in_order(there, own=[label for label in judged if label in there])


def _section(study: Study, group: str, summaries: Sequence[Summary], labels: Sequence[str]) -> dict[str, Any]:
    """What the page shows about one task."""
    planned = next(one for one in study.groups if one.name == group)
    wanted = [variant.label for variant in planned.variants]
    mine = [
        one for one in summaries if (one.study, one.group) == (study.name, group) and one.mechanism in wanted
    ]
    there = [one for one in mine if one.seeds]
    return {
        "id": place_of(study.name, group),
        "title": group if group == study.name else f"{study.name}: {group}",
        "knobs": ", ".join(f"{name} {value}" for name, value in planned.knobs.items()),
        "sweep": mine[0].sweep_words if mine else "",
        "edges": edge_words(there),
        "rows": [_row(one) for one in there],
        "figures": figures_of(there, labels) if there else [],
        "attention": {one.mechanism: _figures(one.attention) for one in there if one.attention},
        "learned": {one.mechanism: _learned(one.learned) for one in there if one.learned},
        "first": there[0] if there else None,
        "missing": [one.mechanism for one in mine if not one.seeds],
    }


def _row(one: Summary) -> dict[str, Any]:
    gain = one.difference
    return {
        "mechanism": one.mechanism,
        "score": one.mean,
        "interval": _interval(one.low, one.high),
        "gain": None if gain is None else gain.mean,
        "gain_interval": "" if gain is None else _interval(gain.low, gain.high),
        "seeds": one.seeds,
        "rate": one.rate_words,
        "parameters": one.parameters,
        "time": None if one.seconds_per_step is None else 1e3 * one.seconds_per_step,
        "failed": one.failed,
    }


def _learned(found: Mapping[str, tuple[float, float, float]]) -> str:
    """
    >>> _learned({"t": (2.0, 1.5, 2.5)})
    't 2 (1.5 to 2.5)'
    """
    return ", ".join(
        f"{name} {number(mean)} ({number(low)} to {number(high)})"
        for name, (mean, low, high) in found.items()
    )


def _figures(found: Mapping[str, float]) -> str:
    """
    >>> _figures({"first_token": 0.25})
    'first token 0.250'
    """
    return ", ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in found.items())


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _claim(study: Study, records: Sequence[Record]) -> dict[str, Any]:
    found, why = verdict(study.rules, [record for record in records if record.study == study.name])
    return {
        "place": place_of(study.name, study.rules[0].group),
        "source": study.source,
        "claim": study.claim,
        "rules": [rule.text for rule in study.rules],
        "verdict": found,
        "mark": _MARKS[found],
        "why": why,
    }
