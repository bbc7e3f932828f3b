"""The page of ``unsoft compare``: scoreboard, sections, playground and claims from one record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from unsoft.formula import Formula
from unsoft.formula.javascript import formula_source, operations_source
from unsoft.lab.report.look import answered_columns, looks, shown_at_first
from unsoft.lab.report.page import CHARTS, CHARTS_STYLE, HERE, embedded_json, page, printable, translator

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
    """Columns of the table: name, title and help of each."""
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


_EXAMPLE = "weight=s*exp(s - m); mass=abs(s)*exp(s - m); peak=s"
"""The formula in the playground if the run has none of the reader's own."""


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
    lang: str = "en",
    texts: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return a self-contained HTML page.

    ``labels`` are the mechanisms in display order; ``sections`` have name, title,
    question, about, controls, figures and parts; ``library`` is the script of Vega-Embed; ``texts`` are
    texts in the language ``lang``, see :func:`unsoft.lab.report.page.translator`.
    """
    shown = shown_at_first(labels)
    further = [OWN, *(label for label in play.formulas if label not in labels)]
    every = looks([*labels, *further])
    reached = [claim["verdict"] for claim in record["claims"] if claim["counts"]]
    verdicts = {verdict: reached.count(verdict) for verdict in record["verdicts"]}
    figures = [figure for section in sections for figure in section["figures"] if figure.on_page]
    translate = translator(texts)
    specs = {figure.name: _translated(figure.for_page(), translate) for figure in figures}
    maps = [list(part.maps) for section in sections for part in section["parts"] if part.maps]
    asked = answered_columns(record)
    disturbed = list(dict.fromkeys(a["name"] for a in record["answers"] if a["disturbed"]))
    recorded = [view for view in sections if view.get("recorded")]
    return page(
        HERE / "comparison.html",
        title=f"{translate(_names(labels))} · {_command(record)}",
        lang=lang,
        texts=texts,
        styles=[CHARTS_STYLE, HERE / "comparison.css"],
        libraries=[library, playground_script(play.formulas)],
        scripts=[CHARTS, HERE / "formula.js", HERE / "comparison.js", HERE / "playground.js"],
        data={
            "looks": every[: len(labels)],
            "more": every[len(labels) :],
            "shown": shown,
            "play": {
                "shown": [label for label in shown if label in play.formulas][:_PLAYED],
                "eps": play.eps,
                "logits": play.logits,
                "others": play.others,
                "curves": play.curves,
                "texts": {label: formula_text(formula) for label, formula in play.formulas.items()},
            },
            "figures": {name: {"spec": spec, "chips": "usermeta" in spec} for name, spec in specs.items()},
            "maps": maps,
        },
        record=record,
        command=_command(record),
        heading=_heading(labels, record["baseline"]["mechanism"]),
        own_formula=next(
            (
                formula_text(play.formulas[one["label"]])
                for one in record["subjects"]
                if one["own"] and one["label"] in play.formulas
            ),
            _EXAMPLE,
        ),
        labels=labels,
        links=_links(sections),
        written=_date(datetime.fromisoformat(record["written"]), lang),
        board=board_rows(record),
        column_groups=[(name, len(list(own))) for name, own in groupby(asked, key=itemgetter("group"))],
        marks=MARKS,
        aims={"lower": "↓", "higher": "↑", "1": "→ 1"},
        best=record["best"],
        questions=asked,
        unasked=[column["title"] for column in record["columns"] if column not in asked],
        disturbed=disturbed,
        disturbed_in={
            one["section"] for one in asked if any(name.startswith(one["name"]) for name in disturbed)
        },
        from_records=list(dict.fromkeys(f"{one['title']}, {one['recorded']}" for one in recorded)),
        eps=play.eps,
        measured=[label for label in labels if label in play.curves],
        sections=sections,
        shown_sections={section["name"] for section in sections},
        verdicts=verdicts,
        claims=_by_source(record["claims"], list(record["verdicts"])),
        provenance=provenance(record["answers"]),
        timing_columns=table_columns(("measurement", "times", "seconds")),
        timings=_timings(record["answers"]),
        problems=[answer for answer in record["answers"] if answer["problem"]],
    )


def _command(record: Mapping[str, Any]) -> str:
    """Return the command that wrote the page, without arguments."""
    return " ".join(str(record["command"]).split()[:2])


def _heading(labels: Sequence[str], baseline: str, most: int = 3) -> str:
    """Return what was compared with softmax as a heading.

    >>> _heading(["softmax", "cog", "sinh"], "softmax")
    'cog and sinh compared with softmax'
    >>> _heading(["softmax", *"abcd"], "softmax")
    '4 attention mechanisms compared with softmax'
    """
    others = [printable(label) for label in labels if label != baseline]
    if not 0 < len(others) <= most:
        return f"{len(others)} attention mechanisms compared with {baseline}"
    named = " and ".join(filter(None, [", ".join(others[:-1]), others[-1]]))
    return f"{named} compared with {baseline}"


def _date(when: datetime, lang: str) -> str:
    """Return a date for readers.

    >>> when = datetime(2026, 11, 3, 9, 5)
    >>> _date(when, "en"), _date(when, "zh")
    ('3 November 2026, 09:05 UTC', '2026 年 11 月 3 日 09:05 UTC')
    """
    if lang == "zh":
        return f"{when.year} 年 {when.month} 月 {when.day} 日 {when:%H:%M} UTC"
    return f"{when.day} {when:%B %Y, %H:%M} UTC"


def _translated(spec: Any, translate: Callable[[str], str]) -> Any:
    """Return a Vega-Lite specification with translated titles and labels."""
    if isinstance(spec, list):
        return [_translated(part, translate) for part in spec]
    if not isinstance(spec, dict):
        return spec
    return {
        key: translate(part)
        if key in ("title", "text") and isinstance(part, str)
        else _translated(part, translate)
        for key, part in spec.items()
    }


def _names(labels: Sequence[str], most: int = 4) -> str:
    """Return the first labels as a title.

    >>> _names(["softmax", "cog"]), _names(list("abcdef"))
    ('softmax, cog', 'a, b, c, d and 2 more')
    """
    more = f" and {len(labels) - most} more" if len(labels) > most else ""
    return ", ".join(printable(label) for label in labels[:most]) + more


def _links(sections: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the groups of the page's list of contents, each with its links."""
    groups: dict[str, list[tuple[str, str]]] = {
        "Results": [("summary", "Summary"), ("playground", "Playground"), ("scoreboard", "Scoreboard")]
    }
    for section in sections:
        groups.setdefault(section["group"] or "More", []).append((section["name"], section["title"]))
    groups["Evidence"] = [("claims", "Claims"), ("provenance", "Provenance")]
    return list(groups.items())


def board_rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of the scoreboard without the baseline, which is pinned above them."""
    pinned = record["baseline"]["mechanism"]
    return [row for row in record["scoreboard"] if row["mechanism"] != pinned]


def formula_text(formula: Formula) -> str:
    """Return a formula as the command line reads it.

    >>> formula_text(Formula("exp(tau*s - m)", "exp(tau*s - m)", "tau*s", params={"tau": 2.0}))
    'weight=exp(tau*s - m); mass=exp(tau*s - m); peak=tau*s; tau=2'
    """
    content = formula.to_dict()
    parts = {name: content.get(name) for name in ("weight", "mass", "peak", "norm", "offset_mass")}
    given = [f"{name}={value}" for name, value in parts.items() if value is not None]
    return "; ".join(given + [f"{name}={value:g}" for name, value in formula.params.items()])


MARKS = {"better": "✓", "same": "≈", "worse": "✗"}
"""Marks of a cell beside its colour: better than softmax, no clear difference, worse."""


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


_FIRST_VERDICTS = ("not supported", "partly supported", "undecided", "at ceiling", "supported")
"""The order of claims: refuted ones first."""


def _by_source(claims: Sequence[Mapping[str, Any]], verdicts: Sequence[str]) -> list[dict[str, Any]]:
    """Group claims by source, with the number of those that could have failed, and of each verdict.

    Sources with the most refuted claims come first, and within a source refuted claims do.
    """
    order = list(dict.fromkeys((*_FIRST_VERDICTS, *verdicts)))
    groups: list[dict[str, Any]] = []
    for source in dict.fromkeys(claim["source"] for claim in claims):
        own = [claim for claim in claims if claim["source"] == source]
        own.sort(key=lambda claim: order.index(claim["verdict"]))
        counts = {verdict: sum(claim["verdict"] == verdict for claim in own) for verdict in order}
        counted = sum(claim["counts"] for claim in own)
        groups.append({"source": source, "claims": own, "counted": counted, "counts": counts})
    return sorted(groups, key=lambda group: -group["counts"][order[0]])


def _timings(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    total: dict[str, dict[str, Any]] = {}
    for answer in answers:
        row = total.setdefault(answer["name"], {"measurement": answer["name"], "times": 0, "seconds": 0.0})
        row["times"] += 1
        row["seconds"] += answer["seconds"]
    return list(total.values())
