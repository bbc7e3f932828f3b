"""The page of ``unsoft compare``: scoreboard, sections, playground and claims from one record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unsoft.formula import Formula
from unsoft.formula.javascript import formula_source, operations_source
from unsoft.lab.report.look import looks, shown_at_first
from unsoft.lab.report.page import CHARTS, CHARTS_STYLE, HERE, embedded_json, page

SCHEMA = 4
"""Version of the record, raised whenever older records can no longer be read."""
OWN = "your own"
"""Label of the formula that a reader types into the playground."""
_PLAYED = 6
"""Number of formulas that the playground shows initially."""


@dataclass(frozen=True)
class Part:
    """Something in a section besides its figures: a text with a table, small charts, or heat maps."""

    heading: str = ""
    text: str = ""
    columns: Sequence[Mapping[str, str]] = ()
    """Of the table: name, title and help of each."""
    rows: Sequence[Mapping[str, Any]] = ()
    charts: Sequence[Mapping[str, Any]] = ()
    """For the macro ``line_chart``: title, help and chart."""
    maps: Sequence[Mapping[str, Any]] = ()
    """Label and rows of weights of each."""
    in_terminal: bool = False
    """True to show it in the terminal, too."""

    @classmethod
    def table(
        cls,
        heading: str,
        text: str,
        titles: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        in_terminal: bool = False,
    ) -> Part:
        """Return a part with a table; rows are cells in the order of the titles."""
        cells = [dict(zip(titles, row, strict=True)) for row in rows]
        return cls(heading, text, table_columns(titles), cells, in_terminal=in_terminal)


def table_columns(titles: Sequence[str]) -> list[dict[str, str]]:
    """Return the columns of a table whose names are their titles."""
    return [{"name": title, "title": title, "help": ""} for title in titles]


@dataclass(frozen=True)
class Playground:
    """Data of the playground."""

    formulas: Mapping[str, Formula]
    eps: float
    """Ridge of the magnitude gate."""
    logits: Sequence[float]
    """Logits at which curves are drawn."""
    others: Sequence[float]
    """Logits of the other keys of such a row."""
    curves: Mapping[str, Sequence[float]]
    """Weights at ``logits`` of mechanisms that are no formula."""


def comparison_page(
    record: Mapping[str, Any],
    labels: Sequence[str],
    sections: Sequence[Mapping[str, Any]],
    play: Playground,
    library: str,
) -> str:
    """Return a self-contained HTML page.

    ``labels`` are the mechanisms in display order; ``sections`` have name, title,
    question, about, controls, figures and parts; ``library`` is the script of Vega-Embed.
    """
    shown = shown_at_first(labels)
    counted = [claim for claim in record["claims"] if claim["counts"]]
    verdicts = {
        verdict: sum(claim["verdict"] == verdict for claim in counted) for verdict in record["verdicts"]
    }
    figures = [figure for section in sections for figure in section["figures"] if figure.on_page]
    specs = {figure.name: figure.for_page() for figure in figures}
    maps = [list(part.maps) for section in sections for part in section["parts"] if part.maps]
    links = [("scoreboard", "Scoreboard"), *((section["name"], section["title"]) for section in sections)]
    links += [("playground", "Playground"), ("claims", "Claims"), ("provenance", "Provenance")]
    asked = [column for column in record["columns"] if _answered(column, record)]
    disturbed = list(dict.fromkeys(a["name"] for a in record["answers"] if a["disturbed"]))
    return page(
        HERE / "comparison.html",
        title="unsoft compare: attention mechanisms side by side",
        styles=[CHARTS_STYLE, HERE / "comparison.css"],
        libraries=[library, playground_script(play.formulas)],
        scripts=[CHARTS, HERE / "formula.js", HERE / "comparison.js", HERE / "playground.js"],
        data={
            "looks": looks(labels),
            "more": looks([OWN, *(label for label in play.formulas if label not in labels)]),
            "shown": shown,
            "play": {
                "shown": [label for label in shown if label in play.formulas][:_PLAYED],
                "eps": play.eps,
                "logits": play.logits,
                "others": play.others,
                "curves": play.curves,
            },
            "figures": {name: {"spec": spec, "chips": "usermeta" in spec} for name, spec in specs.items()},
            "maps": maps,
        },
        record=record,
        labels=labels,
        links=links,
        questions=asked,
        unasked=[column["title"] for column in record["columns"] if column not in asked],
        disturbed=disturbed,
        disturbed_in={
            column["section"]
            for column in asked
            if any(name.startswith(column["name"]) for name in disturbed)
        },
        from_records=list(
            dict.fromkeys(f"{view['title']}, {view['recorded']}" for view in sections if view.get("recorded"))
        ),
        eps=play.eps,
        measured=[label for label in labels if label in play.curves],
        sections=sections,
        shown_sections={section["name"] for section in sections},
        verdicts=verdicts,
        claims=_by_source(record["claims"]),
        provenance=provenance(record["answers"]),
        timing_columns=table_columns(("measurement", "times", "seconds")),
        timings=_timings(record["answers"]),
        problems=[answer for answer in record["answers"] if answer["problem"]],
    )


def _answered(column: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Return True if any mechanism has a number in this column."""
    return any(row["cells"][column["name"]]["value"] is not None for row in record["scoreboard"])


def playground_script(formulas: Mapping[str, Formula]) -> str:
    """Return a script that defines ``unsoftFormulas``: pairs of a label and a function of logits.

    It also defines ``unsoftOperations``, with which the page parses formulas that readers type.

    >>> print(playground_script({"plain": Formula("s/n")}).splitlines()[1])
    const unsoftFormulas = [["plain", (logits, {i = logits.length - 1} = {}) => {
    """
    pairs = ",\n".join(
        f"[{embedded_json(label)}, {formula_source(formula)}]" for label, formula in formulas.items()
    )
    return f'"use strict";\nconst unsoftFormulas = [{pairs}];\n{operations_source()}'


def provenance(answers: Sequence[Mapping[str, Any]]) -> str:
    """Summarise which measurements are of this run, which are cached, and which times may be wrong.

    >>> kept = {"cached": True, "measured": "2026-01-02T03:04:05", "disturbed": False, "is_record": False}
    >>> provenance([kept])
    '1 measurement: none by this run, 1 kept from 2026-01-02, made by the same code'
    >>> provenance([kept | {"cached": False}, kept | {"is_record": True}])
    '1 measurement: all by this run; 1 record read'
    """
    records = [answer for answer in answers if answer["is_record"]]
    measured = [answer for answer in answers if not answer["is_record"]]
    kept = sorted(answer["measured"][:10] for answer in measured if answer["cached"])
    text = f"{_count(len(measured), 'measurement')}: "
    if not kept:
        text += "all by this run"
    else:
        when = kept[0] if kept[0] == kept[-1] else f"{kept[0]} to {kept[-1]}"
        now = len(measured) - len(kept)
        text += f"{now or 'none'} by this run, {len(kept)} kept from {when}, made by the same code"
    if records:
        text += f"; {_count(len(records), 'record')} read"
    if disturbed := sum(answer["disturbed"] for answer in answers):
        text += f"; other programs used the machine during {disturbed} of those that take time"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _by_source(claims: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group claims by source, with the number of those that could have failed."""
    return [
        {"source": source, "claims": own, "counted": sum(claim["counts"] for claim in own)}
        for source in dict.fromkeys(claim["source"] for claim in claims)
        if (own := [claim for claim in claims if claim["source"] == source])
    ]


def _timings(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    total: dict[str, dict[str, Any]] = {}
    for answer in answers:
        row = total.setdefault(answer["name"], {"measurement": answer["name"], "times": 0, "seconds": 0.0})
        row["times"] += 1
        row["seconds"] += answer["seconds"]
    return list(total.values())
