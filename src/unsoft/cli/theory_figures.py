"""The figures of ``unsoft theory``: charts of the rows of ``theory_data``, each written as five files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import altair as alt

from unsoft.cli import theory_data
from unsoft.cli.theory_data import Rows, Subject
from unsoft.files import write_csv, write_json, write_whole
from unsoft.report.figure import Figure, by_value, dashes, html, svg_and_png

_PANELS = 9
_COLOURS = ["#a50026", "#e34a33", "#f4a04c", "#222222", "#74add1", "#4575b4", "#22337a"]
"""Of beta from low to high, dark in the middle, where it is 0."""


def figures(subjects: list[Subject], rows: Rows) -> Iterator[Figure]:
    """All figures, each made when it is asked for."""
    yield _closed("relu2", (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0), "relu2 focuses only if beta < 0")
    floor = "The plain logit never focuses: S stays above sqrt(2/pi)"
    yield _closed("identity", (0.0, 0.5, 1.0, 2.0, 4.0), floor)
    yield _sparsity(rows)
    yield _hijack(subjects)
    yield _length(subjects[0])
    yield _dimension(subjects)
    yield _performer()
    yield _rank()


def write_figure(figure: Figure, folder: Path) -> None:
    """Five files, each whole or not there."""
    spec = figure.for_file()
    for kind, content in (svg_and_png(spec) | {"html": html(spec)}).items():
        write_whole(folder / f"{figure.name}.{kind}", content)
    write_csv(folder / f"{figure.name}.csv", figure.rows)
    write_json(folder / f"{figure.name}.json", {"title": figure.title, "rows": figure.rows})


def _closed(name: str, betas: tuple[float, ...], title: str) -> Figure:
    rows = theory_data.closed_rows(name, betas)
    chart = _lines(rows, "gamma", "S", "beta", colours=_COLOURS[-len(betas) :], zero=True)
    return Figure(f"{name}-sparsity", title, "", rows, chart)


def _sparsity(rows: Rows) -> Figure:
    title = "How evenly a row spreads its weight"
    betas = sorted({row["beta"] for row in rows})
    if len(betas) == 1:
        return Figure("sparsity", title, "", rows, _lines(rows, "gamma", "S", "mechanism", zero=True))
    some = betas[:: -(-len(betas) // _PANELS)]
    shown = [row for row in rows if row["beta"] in some]
    panel = _lines(shown, "gamma", "S", "mechanism", zero=True).properties(width=280, height=340)
    header = alt.Header(labelExpr="'beta = ' + datum.value", title=None)
    chart = panel.facet(facet=alt.Facet("beta:O", header=header), columns=3)
    return Figure("sparsity", title, "", rows, chart)


def _hijack(subjects: list[Subject]) -> Figure:
    rows = theory_data.hijack_rows(subjects)
    title = "A unique key (logit 3) against clones (logit 1)"
    # on values and on mass the share is the same: one line for both
    shown = [
        row | {"mechanism": row["mechanism"].replace(" on mass", "")}
        for row in rows
        if "magnitude on values" not in row["mechanism"]
    ]
    joined = _joined(shown, "share")
    title_of_y = "share of the unique key"
    chart = _lines(joined, "clones", "share", "mechanism", log_x=True, y_title=title_of_y, zero=True)
    return Figure("hijack", title, "", rows, chart)


def _length(subject: Subject) -> Figure:
    rows = theory_data.length_rows(subject)
    title = f"{subject.label}: rows of finite length, beta = 0"
    order = ["64", "1024", "16384", "infinite"]
    return Figure(
        "finite-length", title, "", rows, _lines(rows, "gamma", "S", "keys", order=order, zero=True)
    )


def _dimension(subjects: list[Subject]) -> Figure:
    rows = theory_data.dimension_rows(subjects)
    title = "Keys on a sphere of few dimensions, beta = 0, gamma = 1"
    joined = _joined(rows, "of gaussian")
    title_of_y = "S, of that for Gaussian keys"
    chart = _lines(joined, "dimensions", "of gaussian", "mechanism", log_x=True, y_title=title_of_y)
    return Figure("finite-dimension", title, "", rows, chart)


def _performer() -> Figure:
    rows = theory_data.performer_rows()
    title = "Random features approach softmax (dashed), slowly"
    chart = _lines(rows, "features", "S", "gamma", log_x=True, zero=True)
    return Figure("performer", title, "", rows, chart + dashes(rows, "features", "softmax", "gamma"))


def _rank() -> Figure:
    rows = theory_data.rank_rows()
    title = "Linear attention with 8 features: a causal matrix has full rank"
    return Figure("rank", title, "", rows, _lines(rows, "length", "rank", "matrix", zero=True))


def _lines(rows: Rows, x: str, y: str, by: str, *, y_title: str = "", **options: Any) -> Any:
    """Bare lines; a click on the legend singles one out, the wheel zooms."""
    return by_value(rows, x, y, by, x_title=x, y_title=y_title or y, dots=[], pick=True, **options)


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
