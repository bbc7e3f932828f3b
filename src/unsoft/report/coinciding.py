"""Lines that lie on each other: which they are, and dashes by which all of them are seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_APART = 0.006
"""Of the height of a chart: two lines closer than this everywhere look like one."""
_UNIT = 9
"""Pixels of each colour's turn."""


def coinciding(
    rows: Sequence[Mapping[str, Any]], x: str, y: str, *, choose: Sequence[str] = (), log_y: bool = False
) -> dict[str, list[list[str]]]:
    """Groups of mechanisms whose lines look like one, by the values of the columns ``choose`` ("" if none).

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
    return {panel: found for panel, lines in panels.items() if (found := _groups(lines))}


def panel_of(chosen: Mapping[str, float]) -> str:
    """The key of a choice; the script of charts writes it likewise.

    >>> panel_of({"beta": -1.0, "skip": 0})
    'beta=-1,skip=0'
    """
    return ",".join(f"{name}={value:g}" for name, value in chosen.items())


def in_turns(place: int, count: int) -> list[int]:
    """The dash of one of ``count`` lines that coincide: each is seen for a while, then the next.

    >>> in_turns(0, 2), in_turns(1, 2)
    ([0, 0, 9, 9], [0, 9, 9, 0])
    """
    return [0, place * _UNIT, _UNIT, (count - 1 - place) * _UNIT]


def _groups(lines: Mapping[str, Mapping[float, float]]) -> list[list[str]]:
    every = [value for line in lines.values() for value in line.values()]
    apart = _APART * (max(every) - min(every))
    groups: list[list[str]] = []
    for label, line in lines.items():
        for group in groups:
            other = lines[group[0]]
            close = len(line) > 1 and line.keys() == other.keys()
            if close and all(abs(value - other[place]) <= apart for place, value in line.items()):
                group.append(label)
                break
        else:
            groups.append([label])
    return [group for group in groups if len(group) > 1]
