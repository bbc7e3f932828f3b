"""The figures of ``unsoft theory``: charts of the rows of ``theory_data``, each written as five files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from unsoft.cli import theory_data
from unsoft.cli.theory_data import Rows, Subject
from unsoft.files import write_whole

_WIDTH, _HEIGHT = 560, 340
_PANELS = 9
_COLOURS = [
    "#a50026",
    "#e34a33",
    "#f4a04c",
    "#222222",
    "#74add1",
    "#4575b4",
    "#22337a",
]  # dark in the middle: beta = 0


@dataclass(frozen=True)
class Figure:
    """A chart and the rows it shows; ``name`` is that of its files."""

    name: str
    title: str
    rows: Rows
    chart: Any


def figures(subjects: list[Subject], rows: Rows) -> Iterator[Figure]:
    """All figures, each made when it is asked for."""
    yield _document("relu2", (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0), "relu2 focuses only if beta < 0")
    yield _document(
        "identity", (0.0, 0.5, 1.0, 2.0, 4.0), "The plain logit never focuses: S stays above sqrt(2/pi)"
    )
    yield _sparsity(rows)
    yield _hijack(subjects)
    yield _length(subjects[0])
    yield _dimension(subjects)
    yield _performer()
    yield _rank()


def write_figure(figure: Figure, folder: Path) -> None:
    """Five files, each whole or not there."""
    for kind in ("html", "png", "svg"):
        write_whole(folder / f"{figure.name}.{kind}", _render(figure.chart, kind))
    write_whole(folder / f"{figure.name}.csv", _csv(figure.rows))
    content = {"title": figure.title, "rows": figure.rows}
    write_whole(folder / f"{figure.name}.json", (json.dumps(content, indent=1) + "\n").encode())


def _render(chart: Any, kind: str) -> bytes:
    if kind == "html":  # with the JavaScript inside: the page needs no network
        return chart.to_html(inline=True).encode()
    content = io.BytesIO() if kind == "png" else io.StringIO()
    chart.save(content, format=kind, **({"scale_factor": 2} if kind == "png" else {}))
    found = content.getvalue()
    return found if isinstance(found, bytes) else found.encode()


def _csv(rows: Rows) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _document(name: str, betas: tuple[float, ...], title: str) -> Figure:
    rows = theory_data.document_rows(name, betas)
    chart = _lines(rows, title, x="gamma", y="S", colour="beta:O", colours=_COLOURS[-len(betas) :])
    return Figure(f"{name}-sparsity", title, rows, chart)


def _sparsity(rows: Rows) -> Figure:
    title = "How evenly a row spreads its weight"
    betas = sorted({row["beta"] for row in rows})
    if len(betas) == 1:
        return Figure("sparsity", title, rows, _lines(rows, title, x="gamma", y="S", colour="mechanism:N"))
    some = betas[:: -(-len(betas) // _PANELS)]
    shown = [row for row in rows if row["beta"] in some]
    # the title belongs to the whole, and the panels are narrower
    panel = _lines(shown, None, x="gamma", y="S", colour="mechanism:N", width=_WIDTH // 2)
    header = alt.Header(labelExpr="'beta = ' + datum.value", title=None)
    chart = panel.facet(facet=alt.Facet("beta:O", header=header), columns=3).properties(title=title)
    return Figure("sparsity", title, rows, chart)


def _hijack(subjects: list[Subject]) -> Figure:
    rows = theory_data.hijack_rows(subjects)
    title = "A unique key (logit 3) against clones (logit 1)"
    # on values and on mass the share is the same: one line for both
    shown = [
        row | {"mechanism": row["mechanism"].replace(" on mass", "")}
        for row in rows
        if "magnitude on values" not in row["mechanism"]
    ]
    chart = _lines(
        _joined(shown, "share"),
        title,
        x="clones",
        y="share",
        colour="mechanism:N",
        log_x=True,
        y_title="share of the unique key",
    )
    return Figure("hijack", title, rows, chart)


def _length(subject: Subject) -> Figure:
    rows = theory_data.length_rows(subject)
    title = f"{subject.label}: rows of finite length, beta = 0"
    chart = _lines(rows, title, x="gamma", y="S", colour="keys:O", order=["64", "1024", "16384", "infinite"])
    return Figure("finite-length", title, rows, chart)


def _dimension(subjects: list[Subject]) -> Figure:
    rows = theory_data.dimension_rows(subjects)
    title = "Keys on a sphere of few dimensions, beta = 0, gamma = 1"
    chart = _lines(
        _joined(rows, "of gaussian"), title, x="dimensions", y="of gaussian", colour="mechanism:N", log_x=True,
        y_title="S, of that for Gaussian keys", zero=False,
    )  # fmt: skip
    return Figure("finite-dimension", title, rows, chart)


def _performer() -> Figure:
    rows = theory_data.performer_rows()
    title = "Random features approach softmax (dashed), slowly"
    chart = _lines(rows, title, x="features", y="S", colour="gamma:O", log_x=True)
    limit = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(strokeDash=[4, 4])
        .encode(x=alt.X("features:Q"), y=alt.Y("softmax:Q"), color=alt.Color("gamma:O"))
    )
    return Figure("performer", title, rows, chart + limit)


def _rank() -> Figure:
    rows = theory_data.rank_rows()
    title = "Linear attention with 8 features: a causal matrix has full rank"
    return Figure("rank", title, rows, _lines(rows, title, x="length", y="rank", colour="matrix:N"))


def _lines(
    rows: Rows, title: str | None, *, x: str, y: str, colour: str, colours: list[str] | None = None, log_x: bool = False,
    y_title: str | None = None, order: list[str] | None = None, zero: bool = True, width: int = _WIDTH,
) -> Any:  # fmt: skip
    """Lines with a tooltip; a click on the legend singles one out, the wheel zooms."""
    field = colour.partition(":")[0]
    picked = alt.selection_point(fields=[field], bind="legend")
    scale = alt.Scale(range=colours) if colours else alt.Undefined
    encoding: dict[str, Any] = {
        "x": alt.X(f"{x}:Q", scale=alt.Scale(type="log" if log_x else "linear", nice=False)),
        "y": alt.Y(f"{y}:Q", title=y_title or y, scale=alt.Scale(zero=zero)),
        "color": alt.Color(
            colour, scale=scale, sort=order or alt.Undefined, legend=alt.Legend(labelLimit=320)
        ),
        "opacity": alt.condition(picked, alt.value(1.0), alt.value(0.12)),
        "tooltip": [
            alt.Tooltip(f"{name}:{_kind(value)}", format=_format(value)) for name, value in rows[0].items()
        ],
    }
    chart = alt.Chart(alt.Data(values=rows)).mark_line(clip=True, interpolate="monotone").encode(**encoding)
    heading = {} if title is None else {"title": title}
    return chart.properties(width=width, height=_HEIGHT, **heading).add_params(picked).interactive()


def _joined(rows: Rows, y: str) -> Rows:
    """The rows with one label for mechanisms whose lines coincide; only the last drawn would be seen."""
    lines: dict[str, list[float]] = {}
    for row in rows:
        lines.setdefault(row["mechanism"], []).append(row[y])
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, values in lines.items():
        groups.setdefault(tuple(round(value, 6) for value in values), []).append(name)
    label = {name: ", ".join(names) for names in groups.values() for name in names}
    first = {names[0] for names in groups.values()}
    return [row | {"mechanism": label[row["mechanism"]]} for row in rows if row["mechanism"] in first]


def _kind(value: object) -> str:
    return "N" if isinstance(value, str) else "Q"


def _format(value: object) -> str:
    return "" if isinstance(value, str) else ".4~g"
