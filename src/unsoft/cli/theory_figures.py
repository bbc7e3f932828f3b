"""Figures of ``unsoft theory``, each written as five files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from unsoft.cli import theory_data
from unsoft.cli.theory_data import Rows, TheorySubject
from unsoft.files import write_csv, write_json, write_whole
from unsoft.lab.report.figure import ChartControl, Figure, by_mechanism, by_value, figure_page, svg_and_png

_PANELS = 9
_COLOURS = ["#c1272d", "#e34a33", "#f4a04c", "#888888", "#74add1", "#4575b4", "#5b6fd6"]
"""Colours of beta from low to high, grey at 0; visible on light and dark backgrounds."""
_LOGITS = "Logits are N(beta, gamma²), rows infinitely long; S = 1 is even, S = 0 all on one key."


def figures(subjects: list[TheorySubject], rows: Rows) -> Iterator[tuple[Figure, Sequence[ChartControl]]]:
    """Yield every figure with its controls, created on demand."""
    yield _closed("relu2", (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0), "relu2 focuses only if beta < 0"), ()
    floor = "The plain logit never focuses: S stays above sqrt(2/pi)"
    yield _closed("identity", (0.0, 0.5, 1.0, 2.0, 4.0), floor), ()
    yield _sparsity(rows)
    yield _hijack(subjects), ()
    yield _length(subjects[0]), ()
    yield _dimension(subjects), ()


def write_figure(figure: Figure, controls: Sequence[ChartControl], folder: Path, library: str) -> None:
    """Write five files atomically; ``library`` is the script of Vega-Embed."""
    spec = figure.for_file()
    text = figure_page(figure, controls, library)
    for kind, content in (svg_and_png(spec) | {"html": text.encode()}).items():
        write_whole(folder / f"{figure.name}.{kind}", content)
    write_csv(folder / f"{figure.name}.csv", figure.rows)
    record = {"title": figure.title, "note": figure.note, "rows": figure.rows}
    write_json(folder / f"{figure.name}.json", record)


def _closed(name: str, betas: tuple[float, ...], title: str) -> Figure:
    rows = theory_data.closed_rows(name, betas)
    chart = _lines(rows, "gamma", "S", "beta", colours=_COLOURS[-len(betas) :], zero=True)
    return Figure(f"{name}-sparsity", title, f"In closed form, after Su 2023. {_LOGITS}", rows, chart)


def _sparsity(rows: Rows) -> tuple[Figure, Sequence[ChartControl]]:
    """Return the sparsity figure: the page lets the reader choose beta, files show one panel per beta."""
    betas = sorted({row["beta"] for row in rows})
    some = betas[:: -(-len(betas) // _PANELS)]
    first = min(some, key=abs)
    chart = _mechanisms(rows, "gamma", "S", choose={"beta": first}, zero=True)
    picture = None
    if len(some) > 1:
        panels = []
        for beta in some:
            shown = [row for row in rows if row["beta"] == beta]
            panel = _mechanisms(shown, "gamma", "S", zero=True, fixed=True)
            panels.append(panel.properties(width=280, height=300, title=f"beta = {beta:g}"))
        picture = alt.concat(*panels, columns=3).resolve_scale(color="shared", strokeDash="independent")
    note = f"{_LOGITS}{'' if len(some) > 1 else f' beta = {first:g}.'}"
    options = [(beta, f"{beta:g}") for beta in betas]
    control = ChartControl("beta", "beta, the mean of the logits", options, first)
    figure = Figure("sparsity", "How evenly a row spreads its weight", note, rows, chart, picture=picture)
    return figure, [control] if len(betas) > 1 else []


def _hijack(subjects: list[TheorySubject]) -> Figure:
    rows = theory_data.hijack_rows(subjects)
    # on values and on mass the share is the same: one line for both
    shown = [
        row | {"mechanism": row["mechanism"].replace(" on mass", "")}
        for row in rows
        if "magnitude on values" not in row["mechanism"]
    ]
    title_of_y = "share of the unique key"
    chart = _mechanisms(shown, "clones", "share", log_x=True, y_title=title_of_y, zero=True)
    note = f"The unique key has logit {theory_data.UNIQUE:g}, every clone {theory_data.CLONE:g}; by theory."
    return Figure("hijack", "A unique key against clones of another", note, rows, chart)


def _length(subject: TheorySubject) -> Figure:
    rows = theory_data.length_rows(subject)
    title = f"{subject.label}: rows of finite length"
    chart = _lines(rows, "gamma", "S", "keys", order=["64", "1024", "16384", "infinite"], zero=True)
    note = "beta = 0; means of 64 random rows, and the limit of infinitely many keys."
    return Figure("finite-length", title, note, rows, chart)


def _dimension(subjects: list[TheorySubject]) -> Figure:
    rows = theory_data.dimension_rows(subjects)
    title_of_y = "S, of that for Gaussian keys"
    chart = _mechanisms(rows, "dimensions", "of gaussian", log_x=True, y_title=title_of_y)
    note = "beta = 0, gamma = 1; 1 is what Gaussian keys give."
    return Figure("finite-dimension", "Keys on a sphere of few dimensions", note, rows, chart)


def _mechanisms(rows: Rows, x: str, y: str, *, y_title: str = "", **options: Any) -> Any:
    """Return lines in the colours of the mechanisms."""
    labels = list(dict.fromkeys(row["mechanism"] for row in rows))
    return by_mechanism(labels, rows, x, y, x_title=x, y_title=y_title or y, dots=[], **options)


def _lines(rows: Rows, x: str, y: str, by: str, **options: Any) -> Any:
    return by_value(rows, x, y, by, x_title=x, y_title=y, dots=[], **options)
