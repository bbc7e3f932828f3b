"""Data frames and HTML of results, for notebooks."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a pandas DataFrame; pandas is optional, so ImportError says how to install it."""
    try:
        import pandas
    except ImportError:
        raise ImportError("to_pandas() needs pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame(list(rows))


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table; every cell is escaped.

    >>> html_table([{"name": "a<b", "score": 0.12345}])
    '<table><tr><th>name</th><th>score</th></tr><tr><td>a&lt;b</td><td>0.123</td></tr></table>'
    """
    if not rows:
        return "<table></table>"
    names = list(rows[0])

    def cells(values: Sequence[Any], kind: str) -> str:
        return "".join(f"<{kind}>{escape(_text(value))}</{kind}>" for value in values)

    body = "".join(f"<tr>{cells([row.get(name) for name in names], 'td')}</tr>" for row in rows)
    return f"<table><tr>{cells(names, 'th')}</tr>{body}</table>"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
