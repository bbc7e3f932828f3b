"""Which layers: 3, -1 (the last), "4-7", "8-" (to the end), or several of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ONE, _RANGE = re.compile(r"-?\d+"), re.compile(r"(\d+)-(\d*)")


def select(which: int | str, count: int) -> list[int]:
    """The layers, counted from 0, that ``which`` means in a stack of ``count``.

    >>> select("1-", 4), select(-1, 4), select("0-1", 4)
    ([1, 2, 3], [3], [0, 1])
    >>> select(7, 4)
    Traceback (most recent call last):
    ValueError: layers: 7 is not among the 4 layers 0-3
    """
    text = str(which).strip()
    if isinstance(which, bool) or not isinstance(which, (int, str)):
        raise TypeError(
            f"layers: expected a number or text such as '4-7', not {which!r} ({type(which).__name__})"
        )
    if _ONE.fullmatch(text):
        number = int(text)
        first = last = number + count if number < 0 else number
    elif match := _RANGE.fullmatch(text):
        first, last = int(match[1]), int(match[2]) if match[2] else count - 1
    else:
        raise ValueError(f"layers: expected a number, '4-7' or '8-', not {which!r}")
    if not 0 <= first <= last < count:
        raise ValueError(f"layers: {text} is not among the {count} layers 0-{count - 1}")
    return list(range(first, last + 1))


def select_all(which: Iterable[int | str], count: int) -> set[int]:
    """The layers that several of them mean.

    >>> sorted(select_all([0, "2-"], 5))
    [0, 2, 3, 4]
    """
    return {layer for one in which for layer in select(one, count)}
