"""The skeleton of every page: one file, no network, a content policy that allows its own scripts only.

Templates escape text and attributes. :func:`printable` and :func:`embedded_json` make text of others harmless
in the two other contexts: a terminal, and the data of scripts.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).parent
CHARTS, CHARTS_STYLE = HERE / "charts.js", HERE / "charts.css"
"""Script and style of pages with charts. The script needs Vega-Embed:
:func:`unsoft.lab.report.figure.vega_script`."""
_ALWAYS = (HERE / "elements.js", HERE / "tables.js")
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories: control, format (also bidirectional), surrogate, private, unassigned, separators."""
_NUMBER = re.compile(r"(?<![\w.])[-+−]?\d+(?:\.\d+)?(?!\w)")
_SHORT = {"\n": "⏎", "\t": "⇥", " ": "␣"}
_WIDTH, _HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 350, 10, 172
"""Size of a line chart, and the edges of its plot area, in pixels."""


def page(
    template: Path,
    *,
    title: str,
    data: Mapping[str, Any],
    styles: Sequence[Path] = (),
    scripts: Sequence[Path] = (),
    libraries: Sequence[str] = (),
    lang: str = "en",
    texts: Mapping[str, str] = MappingProxyType({}),
    **values: Any,
) -> str:
    """Return a whole page as text.

    ``template`` is a Jinja2 file for the inside of ``<main>``, in which every value is escaped; ``values``
    are its variables. Scripts find ``data`` in the element ``#data``. ``styles`` and ``scripts`` are files of
    this package, added to the theme and the scripts of every page. ``libraries`` are texts of further
    scripts, which run before these. ``texts`` translates texts of the template, those with the filter ``t``,
    and of the scripts into the language ``lang``; see :func:`translator`.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"printable": printable, "number": number, "brief": brief}
    environment.filters["t"] = translator(texts)
    style = "\n".join(path.read_text() for path in (HERE / "theme.css", *styles))
    every = [*libraries, "\n".join(path.read_text() for path in (*_ALWAYS, *scripts))]
    for script in every:
        if "</script" in script.lower() or "<!--" in script:
            raise ValueError("page: a script holds a text that would end its element")
    said = {key: text for key, text in texts.items() if f'"{key}"' in every[-1]}
    macros = environment.from_string((HERE / "macros.html").read_text()).module
    body = environment.from_string(template.read_text()).render(title=title, macros=macros, **values)
    hashes = " ".join(f"'{_hash(script)}'" for script in every)
    return environment.from_string((HERE / "skeleton.html").read_text()).render(
        title=title,
        lang=lang,
        policy=(
            f"default-src 'none'; style-src '{_hash(style)}'; script-src {hashes}; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
        style=Markup(style),
        scripts=[Markup(script) for script in every],
        body=Markup(body),
        skip_to="content" if 'id="content"' in body else "main",
        data=Markup(embedded_json({**data, "texts": said})),
    )


def translator(texts: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that translates a text, or returns it unchanged.

    A key may stand for many texts: "#" for any number, "{name}" for any words. Keys after "~" are replaced
    inside of such words.

    >>> say = translator({"# keys": "# 个键", "# of {a}: {b}.": "{a} 中的 #：{b}。", "~ and ": "和"})
    >>> say("16 keys"), say("3 of 4 rows: cog and sinh."), say("other")
    ('16 个键', '4 rows 中的 3：cog和sinh。', 'other')
    """
    templates = [(_pattern(key), _numbered(text)) for key, text in texts.items() if "{" in key]
    phrases = [(key[1:], text) for key, text in texts.items() if key.startswith("~")]
    phrases.sort(key=lambda pair: -len(pair[0]))

    def words(text: str) -> str:
        for key, translated in phrases if text not in texts else ():
            text = text.replace(key, translated)
        return texts.get(text, text)

    def translate(text: str) -> str:
        numbers = iter(_NUMBER.findall(text))
        known = texts.get(text) or texts.get(_NUMBER.sub("#", text))
        if known is not None:
            return re.sub("#", lambda _: next(numbers), known)
        for pattern, translated in templates:
            if found := pattern.fullmatch(text):
                given = {name: words(content) for name, content in found.groupdict().items()}
                return translated.format(**given)
        return text

    return translate


def _numbered(text: str) -> str:
    """Return a text in which each "#" has a name: "{_0}", "{_1}", ..."""
    count = itertools.count()
    return re.sub("#", lambda _: f"{{_{next(count)}}}", text)


def _pattern(key: str) -> re.Pattern[str]:
    """Return the pattern of a key with "#" and "{name}"."""
    names = re.findall(r"\{(\w+)\}", _numbered(key))
    pieces = map(re.escape, re.split(r"\{\w+\}|#", key))
    groups = [f"(?P<{name}>{_NUMBER.pattern if name.startswith('_') else '.+?'})" for name in names]
    return re.compile("".join(a + b for a, b in zip(pieces, [*groups, ""], strict=True)), re.DOTALL)


def number(value: Any) -> str:
    """Return a short text for tables: four digits, an exponent only where needed.

    >>> number(0.123456), number(12), number(1e-7), number("word"), number(None), number(float("nan"))
    ('0.123', '12', '1e-07', 'word', '', '')
    """
    if value is None or value != value:
        return ""
    if not isinstance(value, float):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1:
        return f"{value:.3f}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.1g}"


def brief(value: float) -> str:
    """Return a number with two or three digits and a true minus sign.

    >>> [brief(x) for x in (7.390625, 0.0457, 49.99999, 0.3000446, 0.0, 1234.5, -0.507, 3.0)]
    ['7.39', '0.046', '50', '0.30', '0', '1230', '−0.51', '3']
    """
    size = abs(value)
    text = f"{float(f'{size:.3g}'):g}" if size >= 1 else f"{size:.2f}" if size >= 0.1 else f"{size:.2g}"
    return ("−" if value < 0 else "") + text


def listed(words: Iterable[str]) -> str:
    """Return words as a list in a sentence.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    every = list(words)
    return " and ".join([", ".join(every[:-1]), every[-1]] if len(every) > 1 else every)


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def printable(text: str, limit: int = 40) -> str:
    r"""Return a short text without anything that could move a cursor, reverse a line or break a page.

    >>> printable("a\x1b[31m b\n"), printable(" "), printable("x" * 50, 5)
    ('a\\x1b[31m b⏎', '␣', 'xxxx…')
    """
    if text in _SHORT:
        return _SHORT[text]
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(_SHORT[c] if c in "\n\t" else _named(c) for c in short)


def _named(c: str) -> str:
    if unicodedata.category(c) not in _HIDDEN:
        return c
    code = ord(c)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def embedded_json(data: Any) -> str:
    """Return JSON for a ``<script type="application/json">``: nothing in it can end the element.

    NaN and infinities become null.

    >>> embedded_json({"a": "</script>", "b": float("nan")})
    '{"a":"\\\\u003c/script\\\\u003e","b":null}'
    """
    # ASCII only, so that line separators are escaped too.
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data


def line_chart(xs: Sequence[float], ys: Sequence[float], x_name: str) -> dict[str, Any]:
    """Return the coordinates that the macro ``line_chart`` draws; the y axis begins at 0 or below.

    >>> chart = line_chart([0, 1, 2], [0.0, 5.0, 10.0], "depth")
    >>> chart["points"].split()[0], chart["marks"][0]["label"], chart["spoken"]
    ('52.0,172.0', '0', 'from 0.000 at depth 0 to 10 at depth 2')
    """
    ticks = _ticks(min(0.0, *ys), max(0.0, *ys))
    low, span = ticks[0], ticks[-1] - ticks[0]
    first, last = min(xs), max(xs)

    def x_of(x: float) -> float:
        return round(_LEFT + (x - first) / ((last - first) or 1) * (_RIGHT - _LEFT), 1)

    def y_of(y: float) -> float:
        return round(_BOTTOM - (y - low) / span * (_BOTTOM - _TOP), 1)

    points = [(x_of(x), y_of(y)) for x, y in zip(xs, ys, strict=True)]
    step = max(1, -(-len(xs) // 8))
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _RIGHT,
        "bottom": _BOTTOM,
        "points": " ".join(f"{x},{y}" for x, y in points),
        "dots": [
            {"x": x, "y": y, "label": f"{x_name} {number(at)}: {number(value)}"}
            for (x, y), at, value in zip(points, xs, ys, strict=True)
        ],
        "ticks": [{"y": y_of(tick), "label": f"{tick:g}"} for tick in ticks],
        "marks": [{"x": x_of(x), "label": f"{x:g}"} for x in xs[::step]],
        "spoken": (
            f"from {number(ys[0])} at {x_name} {number(xs[0])} to {number(ys[-1])} at {x_name}"
            f" {number(xs[-1])}"
        ),
    }


def _ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers from ``low`` or below to ``high`` or above.

    >>> _ticks(0.0, 0.31), _ticks(-3.0, 8.0)
    ([0.0, 0.1, 0.2, 0.3, 0.4], [-5.0, 0.0, 5.0, 10.0])
    """
    rough = (high - low) / 4 or 0.25
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, max(last, first + 1) + 1)]
