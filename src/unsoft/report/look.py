"""One colour, dash and mark for every mechanism, on every page and in every figure, whatever is shown."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")
"""Okabe and Ito's for colour-blind readers, with black and yellow,
which one of the two themes would hide, replaced.
"""
_OTHERS = ("#c2185b", "#00838f", "#a9713a", "#7e57c2")
"""Of mechanisms that are not in the list below, such as formulas of one's own."""
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2), (12, 3))
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
)
"""The place of a name decides its look, so new ones are added at the end."""


@dataclass(frozen=True)
class Look:
    """How lines and dots of a mechanism are drawn."""

    colour: str
    dash: tuple[int, ...]
    mark: str
    """The name of one of Vega's shapes."""


def look_of(label: str) -> Look:
    """The look of a mechanism by its label. A composition has the colour of its last part.

    >>> look_of("cog")
    Look(colour='#d55e00', dash=(1, 0), mark='square')
    >>> look_of("magnitude+cog").colour == look_of("cog").colour, look_of("magnitude+cog") == look_of("cog")
    (True, False)
    """
    *modifiers, base = label.split("+")
    name, bracket = re.fullmatch(r"\s*([^(]*)(.*)", base, re.DOTALL).groups()  # type: ignore[union-attr]
    found = _base(name.strip())
    changes = [*modifiers, *([bracket] if bracket else [])]
    dash, mark = found.dash, _MARKS.index(found.mark)
    for change in changes:
        digest = zlib.crc32(change.strip().encode())
        dash = (dash if dash[1] else ()) + _MODIFIED[digest % len(_MODIFIED)]
        mark += 1 + digest // len(_MODIFIED) % (len(_MARKS) - 1)
    return Look(found.colour, dash, _MARKS[mark % len(_MARKS)])


def _base(name: str) -> Look:
    colours, marks = len(PALETTE), len(_MARKS)
    if name in _NAMES:
        turn, colour = divmod(_NAMES.index(name), colours)
        return Look(PALETTE[colour], _DASHES[turn], _MARKS[(colour + turn) % marks])
    digest = zlib.crc32(name.encode())
    mark, rest = digest % marks, digest // marks
    return Look(_OTHERS[rest % len(_OTHERS)], _DASHES[rest // len(_OTHERS) % 4], _MARKS[mark])


def looks(labels: Sequence[str]) -> list[dict[str, Any]]:
    """The looks of mechanisms as plain data, for scripts of pages."""
    found = [(label, look_of(label)) for label in labels]
    return [
        {"label": label, "colour": look.colour, "dash": look.dash, "mark": look.mark} for label, look in found
    ]


def in_order(labels: Sequence[str], own: Sequence[str] = ()) -> list[str]:
    """The order in which mechanisms are shown: what users wrote themselves, then the best known, then the
    rest.

    >>> in_order(["tanh", "cog", "softmax", "mine"], own=["mine"])
    ['mine', 'softmax', 'cog', 'tanh']
    """
    return list(dict.fromkeys((*own, *(label for label in _FIRST if label in labels), *labels)))


def shown_at_first(labels: Sequence[str]) -> list[str]:
    """As many as there are colours."""
    return list(labels[: len(PALETTE)])
