"""A colour, dash and mark for every mechanism, the same in all figures of a page.

The best known have the same look on every page; others get a colour that the page does not use yet. Lines
that coincide are drawn in alternating dashes, so that all of them are visible.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")
"""Okabe and Ito's palette for colour-blind readers, without black and yellow, which one theme would hide."""
_OTHERS = ("#c2185b", "#7a8b00", "#a0522d", "#3f51d5")
"""Colours of mechanisms that are not in the list below, such as users' formulas."""
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2), (12, 3), (3, 1), (14, 2, 2, 2))
_MARKS = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "cross",
    "triangle-down",
    "triangle-right",
    "triangle-left",
)
_MODIFIED = ((10, 2), (4, 2), (7, 2, 2, 2), (3, 3), (10, 2, 4, 2), (5, 1, 1, 1))
_FIRST = ("softmax", "cog", "relu2", "sigmoid", "identity", "gpam", "linear-relu", "magnitude")
"""The best known: a colour each."""
_NAMES = (
    *_FIRST,
    *("softpick", "softmax1", "sinh", "swishmax", "l2", "relu", "tanh", "polynomial"),
    *("differential", "differential2", "linear-elu1", "linear-exp", "linear-identity", "linear-taylor2"),
    *("cosformer", "performer", "retention", "decay"),
    *("deltanet", "gated-deltanet", "kda", "elastic", "entmax", "entmax15", "sparsemax", "stick-breaking"),
    *("fox", "rbf", "ssmax", "tda", "dynamic-alibi", "value-residual", "density"),
)
"""The position of a name decides its look, so new names are added at the end."""

_APART = 0.006
"""Share of a chart's height: two lines closer than this everywhere look like one."""
_UNIT = 9
"""Length of an alternating dash in pixels."""


@dataclass(frozen=True)
class Look:
    """Colour, dash and marker of a mechanism."""

    colour: str
    dash: tuple[int, ...]
    mark: str
    """The name of one of Vega's shapes."""


def look_of(label: str) -> Look:
    """Return the look of a mechanism by its label.

    A composition has the colour of its last part; modifiers, and text after the name as in "softmax ×2
    heads", change dash and mark.

    >>> look_of("cog")
    Look(colour='#d55e00', dash=(1, 0), mark='square')
    >>> look_of("magnitude+cog").colour == look_of("cog").colour, look_of("magnitude+cog") == look_of("cog")
    (True, False)
    """
    *modifiers, base = label.split("+")
    name, more = re.fullmatch(r"\s*([^\s(]*)(.*)", base, re.DOTALL).groups()  # type: ignore[union-attr]
    base_look = _base(name)
    changes = [*modifiers, *([more] if more.strip() else [])]
    dash, mark = base_look.dash, _MARKS.index(base_look.mark)
    for change in changes:
        digest = zlib.crc32(change.strip().encode())
        dash = (dash if dash[1] else ()) + _MODIFIED[digest % len(_MODIFIED)]
        mark += 1 + digest // len(_MODIFIED) % (len(_MARKS) - 1)
    return Look(base_look.colour, dash, _MARKS[mark % len(_MARKS)])


def _base(name: str) -> Look:
    colours, marks = len(PALETTE), len(_MARKS)
    if name in _NAMES:
        turn, colour = divmod(_NAMES.index(name), colours)
        return Look(PALETTE[colour], _DASHES[turn], _MARKS[(colour + turn) % marks])
    digest = zlib.crc32(name.encode())
    mark, rest = digest % marks, digest // marks
    return Look(_OTHERS[rest % len(_OTHERS)], _DASHES[rest // len(_OTHERS) % 4], _MARKS[mark])


def page_looks(labels: Sequence[str]) -> dict[str, Look]:
    """Return the looks of the mechanisms on one page: a colour each as long as there are colours.

    >>> found = page_looks(["softmax", "softpick", "magnitude+softmax"])
    >>> len({look.colour for look in found.values()}), found["softmax"] == look_of("softmax")
    (3, True)
    """
    found: dict[str, Look] = {}
    for label in sorted(dict.fromkeys(labels), key=lambda label: label not in _FIRST):
        look = look_of(label)
        colours, marks = ({getattr(one, x) for one in found.values()} for x in ("colour", "mark"))
        free = [colour for colour in (look.colour, *PALETTE, *_OTHERS) if colour not in colours]
        mark = next((mark for mark in (look.mark, *_MARKS) if mark not in marks), look.mark)
        if free:
            look = Look(free[0], look.dash if free[0] == look.colour else _DASHES[0], mark)
        elif look in found.values():
            others = (Look(look.colour, dash, mark) for dash in _DASHES + _MODIFIED for mark in _MARKS)
            look = next((one for one in others if one not in found.values()), look)
        found[label] = look
    return {label: found[label] for label in labels}


def looks(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the looks of the mechanisms on one page as plain data, for its scripts."""
    return [{"label": label, **vars(look)} for label, look in page_looks(labels).items()]


def in_order(labels: Sequence[str], own: Sequence[str] = ()) -> list[str]:
    """Return labels in display order: users' own formulas, then the best known, then the rest.

    >>> in_order(["tanh", "cog", "softmax", "mine"], own=["mine"])
    ['mine', 'softmax', 'cog', 'tanh']
    """
    return list(dict.fromkeys((*own, *(label for label in _FIRST if label in labels), *labels)))


def shown_at_first(labels: Sequence[str]) -> list[str]:
    """Return the labels that are shown initially: as many as there are colours."""
    return list(labels[: len(PALETTE) + len(_OTHERS)])


def coinciding(
    rows: Sequence[Mapping[str, Any]], x: str, y: str, *, choose: Sequence[str] = (), log_y: bool = False
) -> dict[str, list[list[str]]]:
    """Return groups of mechanisms whose lines coincide, by the values of the columns ``choose``.

    >>> rows = [{"mechanism": name, "x": x, "y": x * slope} for name, slope in (("a", 1), ("b", 1), ("c", 2))
    ...         for x in (0.0, 1.0)]
    >>> coinciding(rows, "x", "y")
    {'': [['a', 'b']]}
    """
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        value = row[y]
        if value is None or not math.isfinite(value) or (log_y and value <= 0):
            continue
        lines = panels.setdefault(panel_of({name: row[name] for name in choose}), {})
        lines.setdefault(row["mechanism"], {})[row[x]] = math.log(value) if log_y else value
    groups = {panel: _groups(lines) for panel, lines in panels.items()}
    return {panel: group for panel, group in groups.items() if group}


def answered_columns(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the columns of a comparison's scoreboard in which any mechanism has a number."""
    board = record["scoreboard"]
    return [
        column
        for column in record["columns"]
        if any(row["cells"][column["name"]]["value"] is not None for row in board)
    ]


def panel_of(chosen: Mapping[str, float]) -> str:
    """Return the key of a choice, as charts.js writes it.

    >>> panel_of({"beta": -1.0, "skip": 0})
    'beta=-1,skip=0'
    """
    return ",".join(f"{name}={value:g}" for name, value in chosen.items())


def in_turns(index: int, count: int) -> list[int]:
    """Return the dash of one of ``count`` lines that coincide: they are visible in turns.

    >>> in_turns(0, 2), in_turns(1, 2)
    ([0, 0, 9, 9], [0, 9, 9, 0])
    """
    return [0, index * _UNIT, _UNIT, (count - 1 - index) * _UNIT]


def _groups(lines: Mapping[str, Mapping[float, float]]) -> list[list[str]]:
    every = [value for line in lines.values() for value in line.values()]
    apart = _APART * (max(every) - min(every))
    groups: list[list[str]] = []
    for label, line in lines.items():
        for group in groups:
            other = lines[group[0]]
            close = len(line) > 1 and line.keys() == other.keys()
            if close and all(abs(value - other[x]) <= apart for x, value in line.items()):
                group.append(label)
                break
        else:
            groups.append([label])
    return [group for group in groups if len(group) > 1]


def dash_of(label: str, look: Look, shown: Sequence[str], same: Sequence[Sequence[str]]) -> list[int]:
    """Return the dash of a line, an alternating one if it coincides with others that are shown."""
    for group in same:
        seen = [name for name in group if name in shown]
        if label in seen and len(seen) > 1:
            return in_turns(seen.index(label), len(seen))
    return list(look.dash)
