"""The record of a comparison as one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsoft.formula import Formula
from unsoft.report.claims import VERDICTS
from unsoft.report.comparison.colours import colour_of, dash_of, shown_at_first
from unsoft.report.comparison.figure import Figure
from unsoft.report.comparison.playground import playground_script
from unsoft.report.page import page
from unsoft.report.results import Results
from unsoft.report.scoreboard import QUESTIONS

HERE = Path(__file__).parent
VERDICT_CLASS = dict(zip(VERDICTS, ("yes", "partly", "no", "not-run", "not-run"), strict=True))
_SECTIONS = (
    ("scoreboard", "Scoreboard"), ("focus", "Focus"), ("hijack", "Hijack"), ("sign", "Sign"), ("collapse", "Collapse"), ("solver", "Solver"),
    ("cost", "Cost"), ("playground", "Playground"), ("model", "Model"), ("claims", "Claims"), ("provenance", "Provenance"),
)  # fmt: skip


def comparison_page(
    results: Results,
    figures: Sequence[Figure],
    formulas: Mapping[str, Formula],
    library: str,
    model: Mapping[str, Any] | None = None,
) -> str:
    """The text of an HTML file that needs nothing else.

    ``formulas`` are those of the playground, ``library`` the script of Vega-Embed, ``model`` variables for the section on a real model.
    """
    record = results.record
    labels = results.labels
    colours, dashes, shown = colour_of(labels), dash_of(labels), shown_at_first(labels)
    counts = {verdict: sum(claim["verdict"] == verdict for claim in record["claims"]) for verdict in VERDICTS}
    return page(
        HERE / "page.html",
        title="unsoft compare: attention mechanisms side by side",
        styles=[HERE / "page.css"],
        libraries=[library, playground_script(formulas)],
        scripts=[HERE / "formula.js", HERE / "page.js"],
        data={
            "looks": [{"label": label, "colour": colours[label], "dash": dashes[label]} for label in labels],
            "shown": shown,
            "played": [label for label in shown if label in formulas][:6],
            "figures": {
                figure.name: {"spec": (spec := figure.for_page()), "chips": bool(spec.get("params"))} for figure in figures
            },
            "maps": [{"label": label, "rows": rows} for label in labels if (rows := results.get("map", label))],
        },
        results=results,
        record=record,
        figures=figures,
        questions=QUESTIONS,
        board=record["scoreboard"],
        claims=record["claims"],
        verdicts=list(counts.items()),
        verdict_class=VERDICT_CLASS,
        betas=[-2.0, -1.0, 0.0, 1.0, 2.0],
        timing_columns=[
            {"name": name, "title": title, "help": ""} for name, title in (("name", "measurement"), ("count", "times"), ("seconds", "seconds"))
        ],
        timings=_timings(record["answers"]),
        problems=[answer for answer in record["answers"] if answer["problem"]],
        sections=[pair for pair in _SECTIONS if model or pair[0] != "model"],
        **({"inspection": None, "roles": [], "stacks": [], "swaps": None} | dict(model or {})),
        provenance=provenance(record["answers"]),
    )  # fmt: skip


def provenance(answers: Sequence[Mapping[str, Any]]) -> str:
    """Which measurements are of this run, which were kept from earlier ones, and which of their times to doubt.

    >>> provenance([{"cached": True, "measured": "2026-01-02T03:04:05+00:00", "disturbed": False}])
    '1 measurement: none by this run, 1 kept from 2026-01-02, made by the same code'
    """
    kept = sorted(answer["measured"][:10] for answer in answers if answer["cached"])
    text = f"{len(answers)} measurement{'s' * (len(answers) != 1)}: "
    if not kept:
        text += "all by this run"
    else:
        when = kept[0] if kept[0] == kept[-1] else f"{kept[0]} to {kept[-1]}"
        text += f"{len(answers) - len(kept) or 'none'} by this run, {len(kept)} kept from {when}, made by the same code"
    if disturbed := sum(answer["disturbed"] for answer in answers):
        text += f"; other programs used the machine during {disturbed} of those that take time"
    return text


def _timings(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    total: dict[str, dict[str, Any]] = {}
    for answer in answers:
        row = total.setdefault(answer["name"], {"name": answer["name"], "count": 0, "seconds": 0.0})
        row["count"] += 1
        row["seconds"] += answer["seconds"]
    return list(total.values())
