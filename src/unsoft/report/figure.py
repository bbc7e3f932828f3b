"""A chart with what is said about it, the kinds of charts there are, and the files they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

Rows = list[dict[str, Any]]
_WIDTH, _HEIGHT = 560, 320
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")
"""Okabe and Ito's for colour-blind readers, with black and yellow,
which one of the two themes would hide, replaced.
"""
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2))
_FIRST = ("softmax", "cog", "relu2", "sigmoid", "identity", "gpam", "linear-relu", "magnitude")


@dataclass(frozen=True)
class Figure:
    """``name`` is that of its files; ``note`` says what to look for; ``rows`` are its numbers."""

    name: str
    title: str
    note: str
    rows: Rows
    chart: Any
    on_page: bool = True
    """False if a page shows the same by other means, and only files are wanted."""

    def for_page(self) -> dict[str, Any]:
        """Vega-Lite as wide as its place; the page brings colours of its theme,
        and chips instead of a legend of mechanisms.
        """
        spec = self.chart.properties(width="container", height=_HEIGHT - 40).to_dict(validate=False)
        for layer in spec["layer"] if spec.get("params") else ():
            layer["encoding"].get("color", {}).pop("legend", None)
        return dict(spec)

    def for_file(self) -> dict[str, Any]:
        """Vega-Lite with title, legend and size."""
        sizes = {} if isinstance(self.chart, alt.FacetChart) else {"width": _WIDTH, "height": _HEIGHT}
        spec = self.chart.properties(title=self.title, **sizes).to_dict(validate=False)
        config = {"view": {"stroke": None}, "axis": {"gridColor": "#e5e5e5"}}
        return {**spec, "background": "white", "config": config}


def svg_and_png(spec: dict[str, Any]) -> dict[str, bytes]:
    """Pictures of a Vega-Lite specification, by the ending of their files."""
    import vl_convert

    svg = vl_convert.vegalite_to_svg(spec)
    return {"svg": svg.encode(), "png": vl_convert.svg_to_png(svg, scale=2)}


def vega_script() -> str:
    """The JavaScript that draws charts, as vl-convert brings it: one script. Bundling takes seconds."""
    import vl_convert

    return str(vl_convert.javascript_bundle())  # type: ignore[call-arg]


def html(spec: dict[str, Any]) -> bytes:
    """A page with a chart and all the JavaScript it needs inside."""
    import vl_convert

    return str(vl_convert.vegalite_to_html(spec, bundle=True)).encode()


def in_order(labels: Sequence[str], own: Sequence[str] = ()) -> list[str]:
    """The order in which mechanisms get their colours: what users wrote
    themselves, then the best known, then the rest.

    >>> in_order(["tanh", "cog", "softmax", "mine"], own=["mine"])
    ['mine', 'softmax', 'cog', 'tanh']
    """
    return list(dict.fromkeys((*own, *(label for label in _FIRST if label in labels), *labels)))


def shown_at_first(labels: Sequence[str]) -> list[str]:
    """As many as there are colours."""
    return list(labels[: len(PALETTE)])


def colour_of(labels: Sequence[str]) -> dict[str, str]:
    return {label: PALETTE[k % len(PALETTE)] for k, label in enumerate(labels)}


def dash_of(labels: Sequence[str]) -> dict[str, list[int]]:
    return {label: list(_DASHES[k // len(PALETTE) % len(_DASHES)]) for k, label in enumerate(labels)}


def by_mechanism(
    labels: Sequence[str],
    rows: Rows,
    x: str,
    y: str,
    *,
    x_title: str,
    y_title: str,
    dots: Rows | None = None,
    log_x: bool = False,
    log_y: bool = False,
    tooltip: Sequence[str] = (),
    choose: dict[str, Any] | None = None,
    y_domain: Sequence[float] | None = None,
    ends: tuple[str, str] | None = None,
) -> Any:
    """Lines of mechanisms, dots of measurements; chips of the page choose the mechanisms.

    ``choose`` are further columns of which the page shows one value at a time, with the value shown at first.
    ``ends`` are columns with the lower and upper end of an interval around y.
    """
    chosen = choose or {}
    filters = ["indexof(shown, datum.mechanism) >= 0", *(f"datum.{name} == {name}" for name in chosen)]
    order, colours, dashes = list(labels), colour_of(labels), dash_of(labels)
    encoding: dict[str, Any] = {
        "x": _x(x, x_title, log_x, padding=0 if ends is None else 12),
        "y": _y(y, y_title, log_y, y_domain),
        "color": alt.Color(
            "mechanism:N",
            title=None,
            scale=alt.Scale(domain=order, range=[colours[label] for label in order]),
            legend=alt.Legend(values=shown_at_first(labels), labelLimit=240, symbolType="stroke"),
        ),
        "tooltip": [
            alt.Tooltip(f"{name}:{'N' if name == 'mechanism' else 'Q'}")
            for name in ("mechanism", x, y, *tooltip)
        ],
    }
    scale = alt.Scale(domain=order, range=[dashes[label] for label in order])
    dash = alt.StrokeDash("mechanism:N", legend=None, scale=scale)
    parameters = [alt.param(name="shown", value=shown_at_first(labels))]
    parameters += [alt.param(name=name, value=value) for name, value in chosen.items()]
    bars = None
    if ends is not None:
        low, high = _y(ends[0], y_title, log_y, y_domain), alt.Y2(ends[1])
        whole = [row for row in dots or rows if row[ends[0]] is not None]
        bars = _chart(whole, filters).mark_rule(clip=True, strokeWidth=1.5, opacity=0.6)
        bars = bars.encode(**{**encoding, "y": low, "y2": high})
    drawn = _lines_and_dots(rows, dots, encoding, filters, bars, strokeDash=dash)
    return drawn.add_params(*parameters)


def by_value(
    rows: Rows,
    x: str,
    y: str,
    by: str,
    *,
    x_title: str,
    y_title: str,
    by_title: str | None = None,
    dots: Rows | None = None,
    log_x: bool = False,
    log_y: bool = False,
    y_domain: Sequence[float] | None = None,
    zero: bool = False,
    colours: Sequence[str] = (),
    order: Sequence[str] = (),
    pick: bool = False,
) -> Any:
    """Lines that differ by the value of a column, numbers or words; a legend tells which is which.

    With ``pick`` a click on the legend singles a line out, and the wheel zooms.
    """
    words = any(isinstance(row[by], str) for row in rows)
    scale = alt.Scale(range=list(colours)) if colours or words else alt.Scale(scheme="viridis")
    if words and not colours:
        scale = alt.Scale(range=list(PALETTE))
    encoding: dict[str, Any] = {
        "x": _x(x, x_title, log_x),
        "y": _y(y, y_title, log_y, y_domain, zero),
        "color": alt.Color(
            f"{by}:{'N' if words else 'O'}",
            title=by if by_title is None else by_title,
            scale=scale,
            sort=list(order) or alt.Undefined,
            legend=alt.Legend(labelLimit=320),
        ),
        "tooltip": [
            alt.Tooltip(f"{name}:{'N' if isinstance(value, str) else 'Q'}") for name, value in rows[0].items()
        ],
    }
    if not pick:
        return _lines_and_dots(rows, dots, encoding)
    picked = alt.selection_point(fields=[by], bind="legend")
    encoding["opacity"] = alt.condition(picked, alt.value(1.0), alt.value(0.12))
    return _lines_and_dots(rows, dots, encoding).add_params(picked).interactive()


def grey_dots(rows: Rows, x: str, y: str) -> Any:
    """A line to compare the others with, to be added to a chart."""
    line = alt.Chart(_data(rows)).mark_line(strokeDash=[2, 4], strokeWidth=2, color="#888888")
    return line.encode(x=f"{x}:Q", y=f"{y}:Q", tooltip=[f"{x}:Q", f"{y}:Q"])


def dashes(rows: Rows, x: str, y: str, by: str) -> Any:
    """Dashed lines in the colours of those of ``by``, to be added to a chart."""
    line = alt.Chart(_data(rows)).mark_line(strokeDash=[4, 4])
    return line.encode(x=alt.X(f"{x}:Q"), y=alt.Y(f"{y}:Q"), color=alt.Color(f"{by}:O"))


def heat_maps(rows: Rows) -> Any:
    """A square for each mechanism: weights between -1 and 1 by query and key."""
    colours = alt.Scale(scheme="blueorange", domain=[1, -1])
    return (
        alt.Chart(_data(rows))
        .mark_rect()
        .encode(
            x=alt.X("key:O", axis=None),
            y=alt.Y("query:O", axis=None),
            color=alt.Color("weight:Q", title="weight, of the row's largest", scale=colours),
        )
        .properties(width=150, height=150)
        .facet(facet=alt.Facet("mechanism:N", title=None), columns=4)
    )


def _lines_and_dots(
    rows: Rows,
    dots: Rows | None,
    encoding: dict[str, Any],
    filters: Sequence[str] = (),
    below: Any = None,
    **of_lines: Any,
) -> Any:
    """``dots`` None marks the points of the lines, an empty list leaves them bare; ``below`` is a layer to
    begin with.
    """
    layers = [] if below is None else [below]
    if rows:
        line = _chart(rows, filters).mark_line(clip=True, strokeWidth=2, point=dots is None)
        layers.append(line.encode(**encoding, **of_lines))
    if dots:
        point = _chart(dots, filters).mark_point(clip=True, size=36, filled=True, opacity=0.9)
        layers.append(point.encode(**encoding))
    return alt.layer(*layers)


def _chart(rows: Rows, filters: Sequence[str]) -> Any:
    """Five digits are more than a chart can show."""
    values = [
        {key: float(f"{x:.5g}") if isinstance(x, float) else x for key, x in row.items()} for row in rows
    ]
    chart: Any = alt.Chart(_data(values))
    for test in filters:
        chart = chart.transform_filter(test)
    return chart


def _data(rows: Rows) -> Any:
    return alt.Data(values=rows)  # type: ignore[no-untyped-call]


def _x(name: str, title: str, log: bool, padding: int = 0) -> Any:
    """``padding`` are pixels at both ends, without which dots and intervals there would be cut."""
    values = [f * 10.0**k for k in range(-6, 5) for f in (1, 2, 5)]
    axis = alt.Axis(values=values, format="~g") if log else alt.Axis(tickCount=8)
    scale = alt.Scale(type="log" if log else "linear", nice=False, padding=padding or alt.Undefined)
    return alt.X(f"{name}:Q", title=title, scale=scale, axis=axis)


def _y(name: str, title: str, log: bool, domain: Sequence[float] | None, zero: bool = False) -> Any:
    options: dict[str, Any] = {"type": "log"} if log else {"zero": zero}
    if domain is not None:
        options["domain"] = list(domain)
    powers = [10.0**k for k in range(-9, 5)]
    values = powers if domain else [f * 10.0**k for k in range(-2, 4) for f in (1, 2, 5)]
    axis = alt.Axis(values=values, format="~g") if log else alt.Axis(tickCount=6)
    return alt.Y(f"{name}:Q", title=title, scale=alt.Scale(**options), axis=axis)
