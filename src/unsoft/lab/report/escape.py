"""What others wrote, made harmless.

Templates escape text and attributes; these are the two other places it can go to.
"""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any

_HIDDEN = {
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Cn",
    "Zl",
    "Zp",
}  # control, format (bidi too), surrogates, unassigned, separators
_SHORT = {"\n": "⏎", "\t": "⇥", " ": "␣"}


def printable(text: str, limit: int = 40) -> str:
    r"""A short text without anything that could move a cursor, turn a line round or break a page.

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
    return (
        f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" if ord(c) < 65536 else f"\\U{ord(c):08x}"
    )


def embedded_json(data: Any) -> str:
    """JSON that may stand inside a ``<script type="application/json">``: nothing in it can end the element.

    Numbers that JSON does not know become null.

    >>> embedded_json({"a": "</script>", "b": float("nan")})
    '{"a":"\\\\u003c/script\\\\u003e","b":null}'
    """
    text = json.dumps(
        _finite(data), separators=(",", ":"), allow_nan=False
    )  # ASCII: line separators are escaped too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
