"""A chart with what is said about it, and the parts that all charts are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from unsoft.report.comparison.colours import colour_of, dash_of, shown_at_first

Rows = list[dict[str, Any]]
_WIDTH, _HEIGHT = 560, 320


@dataclass(frozen=True)
class Figure:
    """``name`` is that of its files; ``section`` where it stands on the page; ``note`` what to look for."""

    name: str
    section: str
    title: str
    note: str
    rows: Rows
    chart: Any

    def for_page(self) -> dict[str, Any]:
        """Vega-Lite as wide as its place; the page brings colours of its theme, and chips instead of a legend of mechanisms."""
        spec = self.chart.properties(width="container", height=_HEIGHT - 40).to_dict(validate=False)
        for layer in spec["layer"] if spec.get("params") else ():
            layer["encoding"].get("color", {}).pop("legend", None)
        return spec

    def for_file(self) -> dict[str, Any]:
        """Vega-Lite with title, legend and size, for PNG and SVG."""
        spec = self.chart.properties(width=_WIDTH, height=_HEIGHT, title=self.title).to_dict(validate=False)
        return spec | {
            "background": "white",
            "config": {"view": {"stroke": None}, "axis": {"gridColor": "#e5e5e5"}},
        }


def rounded(rows: Rows) -> Rows:
    """Five digits are more than a chart can show."""
    return [{key: float(f"{x:.5g}") if isinstance(x, float) else x for key, x in row.items()} for row in rows]


def by_mechanism(
    labels: Sequence[str], rows: Rows, x: str, y: str, *, x_title: str, y_title: str, dots: Rows | None = None, log_x: bool = False,
    log_y: bool = False, tooltip: Sequence[str] = (), more: Sequence[tuple[str, Any, str]] = (), y_domain: Sequence[float] | None = None,
) -> Any:  # fmt: skip
    """Lines of mechanisms, dots of measurements. ``more`` are parameters of the page: name, value, filter."""
    parameters = [alt.param(name="shown", value=shown_at_first(labels))]
    parameters += [alt.param(name=name, value=value) for name, value, _ in more]
    filters = ["indexof(shown, datum.mechanism) >= 0", *(test for *_, test in more)]
    order = list(labels)
    colours, dashes = colour_of(labels), dash_of(labels)
    encoding: dict[str, Any] = {
        "x": _x(x, x_title, log_x),
        "y": _y(y, y_title, log_y, y_domain),
        "color": alt.Color(
            "mechanism:N", title=None, scale=alt.Scale(domain=order, range=[colours[label] for label in order]),
            legend=alt.Legend(values=shown_at_first(labels), labelLimit=240, symbolType="stroke"),
        ),
        "tooltip": [alt.Tooltip(f"{name}:{'N' if name == 'mechanism' else 'Q'}") for name in ("mechanism", x, y, *tooltip)],
    }  # fmt: skip
    dash = alt.StrokeDash(
        "mechanism:N", legend=None, scale=alt.Scale(domain=order, range=[dashes[label] for label in order])
    )
    layers = []
    if rows:
        layers.append(
            _filtered(alt.Chart(alt.Data(values=rounded(rows))), filters)
            .mark_line(clip=True, strokeWidth=2, point=dots is None)
            .encode(**encoding, strokeDash=dash)
        )
    if dots:
        layers.append(
            _filtered(alt.Chart(alt.Data(values=rounded(dots))), filters)
            .mark_point(clip=True, size=36, filled=True, opacity=0.9)
            .encode(**encoding)
        )
    return alt.layer(*layers).add_params(*parameters)


def by_number(
    rows: Rows, x: str, y: str, by: str, *, x_title: str, y_title: str, by_title: str, dots: Rows | None = None, log_x: bool = False,
    log_y: bool = False, y_domain: Sequence[float] | None = None, scheme: str = "viridis",
) -> Any:  # fmt: skip
    """Lines of one mechanism for several values of a number."""
    encoding: dict[str, Any] = {
        "x": _x(x, x_title, log_x),
        "y": _y(y, y_title, log_y, y_domain),
        "color": alt.Color(f"{by}:O", title=by_title, scale=alt.Scale(scheme=scheme)),
        "tooltip": [alt.Tooltip(f"{name}:Q") for name in (by, x, y)],
    }
    chart = (
        alt.Chart(alt.Data(values=rounded(rows)))
        .mark_line(clip=True, strokeWidth=2, point=dots is None)
        .encode(**encoding)
    )
    if not dots:
        return alt.layer(chart)
    points = (
        alt.Chart(alt.Data(values=rounded(dots)))
        .mark_point(clip=True, size=36, filled=True)
        .encode(**encoding)
    )
    return alt.layer(chart, points)


def _filtered(chart: Any, filters: Sequence[str]) -> Any:
    for test in filters:
        chart = chart.transform_filter(test)
    return chart


def _x(name: str, title: str, log: bool) -> Any:
    axis = (
        alt.Axis(values=[f * 10**k for k in range(5) for f in (1, 2, 5)], format="~g")
        if log
        else alt.Axis(tickCount=8)
    )
    return alt.X(
        f"{name}:Q", title=title, scale=alt.Scale(type="log" if log else "linear", nice=False), axis=axis
    )


def _y(name: str, title: str, log: bool, domain: Sequence[float] | None) -> Any:
    options: dict[str, Any] = {"type": "log"} if log else {"zero": False}
    if domain is not None:
        options["domain"] = list(domain)
    decades = (
        [10.0**k for k in range(-9, 5)] if domain else [f * 10.0**k for k in range(-2, 4) for f in (1, 2, 5)]
    )
    axis = alt.Axis(values=decades, format="~g") if log else alt.Axis(tickCount=6)
    return alt.Y(f"{name}:Q", title=title, scale=alt.Scale(**options), axis=axis)
