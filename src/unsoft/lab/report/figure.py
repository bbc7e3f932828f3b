"""Figures: a chart with its title and note, the kinds of charts, and the pictures and pages they become."""

from __future__ import annotations

import hashlib
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from unsoft.lab.report.look import PALETTE, coinciding, dash_of, looks, page_looks, panel_of, shown_at_first
from unsoft.lab.report.page import CHARTS, CHARTS_STYLE, HERE, page

Rows = list[dict[str, Any]]
_WIDTH, _HEIGHT = 560, 320
_LINE = 96
"""Letters in a line below the title of a picture."""


@dataclass(frozen=True)
class ChartControl:
    """A choice above charts: ``options`` are pairs of a value and its label, ``name`` is the parameter."""

    name: str
    label: str
    options: Sequence[tuple[float, str]]
    first: float = 0.0


@dataclass(frozen=True)
class Figure:
    """A chart; ``name`` is that of its files, ``note`` its setting, ``rows`` the numbers for its table."""

    name: str
    title: str
    note: str
    rows: Rows
    chart: Any
    on_page: bool = True
    """False if a page shows the same by other means, so that only files are written."""
    picture: Any = None
    """The chart of its files, if that is another one."""

    def for_page(self) -> dict[str, Any]:
        """Return Vega-Lite as wide as its container; the page adds its theme and its own legend."""
        spec = _spec(self.chart.properties(width="container", height=_HEIGHT - 40))
        if spec.get("usermeta", {}).get("bars"):
            return spec | {"height": {"step": 11}}
        for layer in spec["layer"] if "usermeta" in spec else ():
            for channel in ("color", "shape"):
                if channel in layer.get("encoding", {}):
                    layer["encoding"][channel]["legend"] = None
        return spec

    def for_file(self) -> dict[str, Any]:
        """Return Vega-Lite with title, note, legend and size."""
        chart = self.chart if self.picture is None else self.picture
        many = isinstance(chart, (alt.FacetChart, alt.ConcatChart))
        has_bars = not many and "bars" in chart.to_dict(validate=False).get("usermeta", {})
        sizes = {} if many else {"width": _WIDTH} if has_bars else {"width": _WIDTH, "height": _HEIGHT}
        spec = _spec(chart.properties(**sizes))
        texts = [self.note, _same_lines(spec.pop("usermeta", None))]
        lines = [line for text in texts if text for line in textwrap.wrap(text, _LINE)]
        spec["title"] = {"text": self.title, "subtitle": lines, "anchor": "start", "subtitlePadding": 4}
        config = {"view": {"stroke": None}, "axis": {"gridColor": "#e5e5e5"}}
        return {**spec, "background": "white", "config": config}


def _same_lines(about: Mapping[str, Any] | None) -> str:
    same = about["same"].get(about["panel"], ()) if about and "same" in about else ()
    groups = [" = ".join(group) for group in same]
    return f"On one line, in turns: {'; '.join(groups)}." if groups else ""


_drawing = False
"""True once this process has started the threads of vl-convert."""


def has_drawn() -> bool:
    """Return True once anything was drawn: a forked copy would wait forever for threads it does not have."""
    return _drawing


def _converter() -> Any:
    global _drawing
    import vl_convert

    _drawing = True
    return vl_convert


def svg_and_png(spec: dict[str, Any]) -> dict[str, bytes]:
    """Return pictures of a Vega-Lite specification by file extension."""
    vl_convert = _converter()
    svg = vl_convert.vegalite_to_svg(spec)
    return {"svg": svg.encode(), "png": vl_convert.svg_to_png(svg, scale=2)}


def vega_script() -> str:
    """Return the JavaScript of Vega-Embed that vl-convert bundles, which takes seconds."""
    return str(_converter().javascript_bundle())


def figure_page(figure: Figure, controls: Sequence[ChartControl], library: str) -> str:
    """Return one figure as a self-contained HTML page; ``library`` is the script of Vega-Embed."""
    spec = figure.for_page()
    labels = spec["usermeta"]["mechanisms"] if "usermeta" in spec else []
    return page(
        HERE / "figure.html",
        title=f"unsoft: {figure.title}",
        styles=[CHARTS_STYLE],
        libraries=[library],
        scripts=[CHARTS],
        data={
            "looks": looks(spec["usermeta"]["order"] if labels else []),
            "shown": labels,
            "figures": {figure.name: {"spec": spec, "chips": bool(labels)}},
        },
        figure=figure,
        labels=labels,
        controls=controls,
    )


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
    ticks: Sequence[float] = (),
    tooltip: Sequence[str] = (),
    choose: dict[str, Any] | None = None,
    y_domain: Sequence[float] | None = None,
    ends: tuple[str, str] | None = None,
    zero: bool = False,
    spread: bool = False,
    fixed: bool = False,
) -> Any:
    """Return a chart with a line per mechanism and dots for measurements; the page selects mechanisms.

    ``choose`` maps further columns, of which the page shows one value at a time, to their initial value.
    ``ends`` are columns with the ends of a confidence interval around y, ``ticks`` the only values of x.
    ``spread`` draws y by its square root, for lines of which most are near 0. A ``fixed`` chart has no
    choices and shows all mechanisms.
    """
    chosen = choose or {}
    filters = ["indexof(shown, datum.mechanism) >= 0", *(f"datum.{name} == {name}" for name in chosen)]
    order, first = list(labels), list(labels) if fixed else shown_at_first(labels)
    filters = [] if fixed else filters
    looks = list(page_looks(order).values())
    seen = [*rows, *(dots or ())]
    legend = alt.Legend(values=first, labelLimit=240)
    encoding: dict[str, Any] = {
        "x": _x(x, x_title, log_x, ticks, padding=12 if ends or ticks else 0, rows=seen),
        "y": _y(y, y_title, log_y, y_domain, zero, rows=seen, spread=spread),
        "color": alt.Color(
            "mechanism:N",
            title=None,
            scale=alt.Scale(domain=order, range=[look.colour for look in looks]),
            legend=legend,
        ),
        "tooltip": [
            alt.Tooltip(f"{name}:{'N' if name == 'mechanism' else 'Q'}")
            for name in ("mechanism", x, y, *tooltip)
        ],
    }
    about: dict[str, Any] = {
        "order": order,
        "mechanisms": [name for name in order if any(row["mechanism"] == name for row in (dots or rows))],
        "same": coinciding(rows, x, y, choose=list(chosen), log_y=log_y),
        "x": x,
        "y": y,
        "choose": list(chosen),
        "panel": panel_of(chosen),
    }
    # The script of pages computes these again whenever other mechanisms are shown.
    same = about["same"].get(about["panel"], [])
    dashes = [dash_of(label, look, first, same) for label, look in zip(order, looks, strict=True)]
    range_ = dashes if fixed else [alt.expr(f"dashes[{k}]") for k in range(len(order))]
    # Another domain than that of the colours: else Vega-Lite joins them, and dashes the legend's marks.
    scale = alt.Scale(domain=["", *order], range=[[1, 0], *range_])
    dash = alt.StrokeDash("mechanism:N", legend=None, scale=scale)
    scale = alt.Scale(domain=order, range=[look.mark for look in looks])
    shape = alt.Shape("mechanism:N", title=None, scale=scale, legend=legend)
    parameters = [alt.param(name="shown", value=first), alt.param(name="dashes", value=dashes)]
    parameters += [alt.param(name=name, value=value) for name, value in chosen.items()]
    bars = None
    if ends is not None:
        low, high = _y(ends[0], y_title, log_y, y_domain, rows=seen), alt.Y2(ends[1])
        if whole := [row for row in dots or rows if row[ends[0]] is not None]:
            bars = _chart(whole, filters).mark_rule(clip=True, strokeWidth=1.5, opacity=0.6)
            bars = bars.encode(**{**encoding, "y": low, "y2": high})
    drawn = _lines_and_dots(rows, dots, encoding, filters, bars, {"strokeDash": dash}, {"shape": shape})
    return drawn if fixed else drawn.add_params(*parameters).properties(usermeta=about)


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
) -> Any:
    """Return a chart with a line for each value, number or text, of the column ``by``."""
    texts = any(isinstance(row[by], str) for row in rows)
    scale = alt.Scale(range=list(colours or PALETTE)) if colours or texts else alt.Scale(scheme="viridis")
    if by == "mechanism":
        names = list(dict.fromkeys(row[by] for row in rows))
        scale = alt.Scale(domain=names, range=[look.colour for look in page_looks(names).values()])
    encoding: dict[str, Any] = {
        "x": _x(x, x_title, log_x, rows=rows),
        "y": _y(y, y_title, log_y, y_domain, zero, rows=rows),
        "color": alt.Color(
            f"{by}:{'N' if texts else 'O'}",
            title=by if by_title is None else by_title,
            scale=scale,
            sort=list(order) or alt.Undefined,
            legend=alt.Legend(labelLimit=320),
        ),
        "tooltip": [
            alt.Tooltip(f"{name}:{'N' if isinstance(value, str) else 'Q'}") for name, value in rows[0].items()
        ],
    }
    return _lines_and_dots(rows, dots, encoding)


def reference_line(y: float, text: str) -> Any:
    """Return a dotted horizontal line with its meaning above it, to add to a chart."""
    chart: Any = alt.Chart(_data([{"reference": y, "text": text}]))
    line = chart.mark_rule(strokeDash=[2, 4], strokeWidth=1.5, color="#808080").encode(y="reference:Q")
    words = chart.mark_text(align="right", baseline="bottom", dx=-4, dy=-3, color="#808080", fontSize=11)
    return line + words.encode(x=alt.value("width"), y="reference:Q", text="text:N")


def bars(
    labels: Sequence[str], rows: Rows, x: str, by: str, *, x_title: str, tooltip: Sequence[str] = ()
) -> Any:
    """Return horizontal bars, one for each mechanism and value of ``by``; the page selects mechanisms."""
    order, first = list(labels), shown_at_first(labels)
    colours = [look.colour for look in page_looks(order).values()]
    chart = _chart(rows, ["indexof(shown, datum.mechanism) >= 0"])
    values = sorted({row[by] for row in rows})
    bar = chart.mark_bar(cornerRadiusEnd=2).encode(
        x=alt.X(f"{x}:Q", title=x_title, scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=6)),
        y=alt.Y("mechanism:N", title=None, sort=order, axis=alt.Axis(labelLimit=170)),
        yOffset=alt.YOffset(f"{by}:O"),
        color=alt.Color("mechanism:N", scale=alt.Scale(domain=order, range=colours), legend=None),
        opacity=alt.Opacity(f"{by}:O", title=by, scale=alt.Scale(domain=values, range=[0.55, 1.0])),
        tooltip=[alt.Tooltip("mechanism:N"), *(alt.Tooltip(f"{name}:Q") for name in (by, x, *tooltip))],
    )
    one = alt.Chart(_data([{"reference": 1}])).mark_rule(strokeDash=[2, 4], strokeWidth=1.5, color="#808080")
    about = {"mechanisms": order, "order": order, "bars": True}
    drawn: Any = alt.layer(bar, one.encode(x="reference:Q")).add_params(alt.param(name="shown", value=first))
    return drawn.properties(usermeta=about)


def heat_maps(rows: Rows) -> Any:
    """Return a heat map per mechanism: weights between -1 and 1 by query and key."""
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
    of_lines: Mapping[str, Any] | None = None,
    of_dots: Mapping[str, Any] | None = None,
) -> Any:
    """Layer lines and dots; ``dots`` None marks the points of the lines, an empty list none."""
    layers = [] if below is None else [below]
    if rows:
        line = _chart(rows, filters).mark_line(clip=True, strokeWidth=2)
        layers.append(line.encode(**encoding, **(of_lines or {})))
    if marked := rows if dots is None else dots:
        # Hollow, so that marks of different shapes at one point are all visible.
        point = _chart(marked, filters).mark_point(clip=True, size=46, filled=False, strokeWidth=1.8)
        layers.append(point.encode(**encoding, **(of_dots or {})))
    return alt.layer(*layers)


def _chart(rows: Rows, filters: Sequence[str]) -> Any:
    """Return a chart of the rows, rounded to five digits: a chart cannot show more."""
    short = [{k: float(f"{x:.5g}") if isinstance(x, float) else x for k, x in row.items()} for row in rows]
    chart: Any = alt.Chart(_data(short))
    for test in filters:
        chart = chart.transform_filter(test)
    return chart


class _Named(str):
    """A data name that carries its rows: Altair would deep-copy rows again and again."""

    rows: Rows


def _data(rows: Rows) -> Any:
    name = _Named(f"data-{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}")
    name.rows = rows
    return alt.Data(name=name)  # type: ignore[no-untyped-call]


def _spec(chart: Any) -> dict[str, Any]:
    """Return Vega-Lite with the rows as named datasets."""
    spec: dict[str, Any] = chart.to_dict(validate=False)
    parts: list[Any] = [spec]
    for part in parts:
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return spec | {"datasets": {part: part.rows for part in parts if isinstance(part, _Named)}}


def _x(
    name: str,
    title: str,
    log: bool,
    ticks: Sequence[float] = (),
    padding: int = 0,
    rows: Sequence[Mapping[str, Any]] = (),
) -> Any:
    """Return the x axis; ``padding`` pixels at both ends keep dots and intervals there from being cut."""
    values = list(ticks) or (_log_ticks([row.get(name) for row in rows]) if log else [])
    axis = alt.Axis(values=values, format="~g") if log or ticks else alt.Axis(tickCount=8)
    scale = alt.Scale(type="log" if log else "linear", nice=False, padding=padding or alt.Undefined)
    return alt.X(f"{name}:Q", title=title, scale=scale, axis=axis)


def _y(
    name: str,
    title: str,
    log: bool,
    domain: Sequence[float] | None,
    zero: bool = False,
    rows: Sequence[Mapping[str, Any]] = (),
    *,
    spread: bool = False,
) -> Any:
    options: dict[str, Any] = {"type": "log"} if log else {"zero": zero}
    if spread:
        options["type"] = "sqrt"
    if domain is not None:
        options["domain"] = list(domain)
    values = _log_ticks(domain or [row.get(name) for row in rows]) if log else []
    axis = alt.Axis(values=values, format="~g") if log else alt.Axis(tickCount=6)
    return alt.Y(f"{name}:Q", title=title, scale=alt.Scale(**options), axis=axis)


def _log_ticks(values: Sequence[float | None]) -> list[float]:
    """Return the ticks of a logarithmic axis over all of these values: about eight of them.

    >>> _log_ticks([0.3, None, 12]), _log_ticks([1e-9, 50])
    ([0.5, 1.0, 2.0, 5.0, 10.0], [1e-08, 1e-06, 0.0001, 0.01, 1.0])
    """
    seen = [value for value in values if value is not None and 0 < value < math.inf]
    if not seen:
        return []
    low, high = math.log10(min(seen)), math.log10(max(seen))
    factors = (1, 2, 5) if high - low <= 3 else (1,)
    step = max(1, math.ceil((high - low) / 8))
    powers = [k for k in range(math.floor(low), math.ceil(high) + 1) if k % step == 0]
    ticks = [factor * 10.0**k for k in powers for factor in factors]
    return [tick for tick in ticks if min(seen) * 0.999 <= tick <= max(seen) * 1.001]
