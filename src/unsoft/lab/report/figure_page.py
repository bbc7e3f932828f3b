"""One figure as a page of its own, in the theme of all pages."""

from __future__ import annotations

from collections.abc import Sequence

from unsoft.lab.report.control import Control
from unsoft.lab.report.figure import Figure
from unsoft.lab.report.look import looks
from unsoft.lab.report.page import CHARTS, CHARTS_STYLE, HERE, page


def figure_page(figure: Figure, controls: Sequence[Control], library: str) -> str:
    """The text of an HTML file that needs nothing else; ``library`` is the script of Vega-Embed."""
    spec = figure.for_page()
    labels = spec["usermeta"]["mechanisms"] if "usermeta" in spec else []
    return page(
        HERE / "figure.html",
        title=f"unsoft: {figure.title}",
        styles=[CHARTS_STYLE],
        libraries=[library],
        scripts=[CHARTS],
        data={
            "looks": looks(labels),
            "shown": labels,
            "figures": {figure.name: {"spec": spec, "chips": bool(labels)}},
        },
        figure=figure,
        labels=labels,
        controls=controls,
    )
