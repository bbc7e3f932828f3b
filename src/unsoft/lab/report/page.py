"""The skeleton of every page: one file, no network, a policy that runs
nothing but the scripts it was written with.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsoft.lab.report.escape import embedded_json, printable

HERE = Path(__file__).parent
_ALWAYS = (HERE / "elements.js", HERE / "tables.js")
CHARTS, CHARTS_STYLE = HERE / "charts.js", HERE / "charts.css"
"""Of pages with charts; the script needs Vega-Embed, see :func:`unsoft.lab.report.figure.vega_script`."""


def page(
    template: Path,
    *,
    title: str,
    data: Mapping[str, Any],
    styles: Sequence[Path] = (),
    scripts: Sequence[Path] = (),
    libraries: Sequence[str] = (),
    **values: Any,
) -> str:
    """A whole page as text.

    ``template`` is a Jinja2 file for the inside of ``<main>``, in which every value is escaped; ``values``
    are its variables. ``data`` is what scripts find in the element ``#data``. ``styles`` and ``scripts`` are
    files of this package, which follow the theme and the scripts of every page. ``libraries`` are texts of
    further scripts, which run before these.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"printable": printable, "number": number}
    style = "\n".join(path.read_text() for path in (HERE / "theme.css", *styles))
    every = [*libraries, "\n".join(path.read_text() for path in (*_ALWAYS, *scripts))]
    for script in every:
        if "</script" in script.lower() or "<!--" in script:
            raise ValueError("page: a script holds a text that would end its element")
    macros = environment.from_string((HERE / "macros.html").read_text()).module
    body = environment.from_string(template.read_text()).render(title=title, macros=macros, **values)
    hashes = " ".join(f"'{_hash(script)}'" for script in every)
    return environment.from_string((HERE / "skeleton.html").read_text()).render(
        title=title,
        policy=(
            f"default-src 'none'; style-src '{_hash(style)}'; script-src {hashes}; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
        style=Markup(style),
        scripts=[Markup(script) for script in every],
        body=Markup(body),
        data=Markup(embedded_json(data)),
    )


def number(value: Any) -> str:
    """Short, for tables: four digits, no exponent where none is needed.

    >>> number(0.123456), number(12), number(1e-7), number("word"), number(None), number(float("nan"))
    ('0.123', '12', '1e-07', 'word', '', '')
    """
    if value is None or value != value:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1:
        return f"{value:.3f}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.1g}"


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
