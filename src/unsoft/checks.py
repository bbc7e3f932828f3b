"""Checks of arguments at the boundary, with one wording for every package.

Each check returns the value, or raises TypeError (wrong kind) or ValueError (wrong value) with the caller,
the argument, what was given and what would work.
"""

import difflib
import math
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def whole_number(who: str, name: str, value: object, low: int = 1, high: int | None = None) -> int:
    """Return ``value`` if it is an int from ``low`` to ``high``. A bool is not a whole number.

    >>> whole_number("inspect", "length", 8)
    8
    >>> whole_number("inspect", "length", 0)
    Traceback (most recent call last):
    ValueError: inspect: argument 'length' must be a whole number of at least 1, not 0
    """
    wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
    problem = f"{who}: argument '{name}' must be a whole number {wanted}, not {value!r}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(problem)
    if value < low or (high is not None and value > high):
        raise ValueError(problem)
    return value


def finite(who: str, name: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number.

    >>> finite("study", "margin", 0.5)
    0.5
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{who}: argument '{name}' must be a number, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{who}: argument '{name}' must be a finite number, not {value!r}")
    return float(value)


def positive(who: str, name: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number above 0.

    >>> positive("weighting", "t", -1)
    Traceback (most recent call last):
    ValueError: weighting: argument 't' must be above 0, not -1
    """
    number = finite(who, name, value)
    if number <= 0:
        raise ValueError(f"{who}: argument '{name}' must be above 0, not {value!r}")
    return number


def one_of(who: str, name: str, value: T, options: Iterable[T]) -> T:
    """Return ``value`` if it is one of ``options``.

    >>> one_of("swap", "init", "opne", ["open", "paper"])
    Traceback (most recent call last):
    ValueError: swap: argument 'init' must be 'open' or 'paper', not 'opne'; did you mean 'open'?
    """
    known = list(options)
    if value in known:
        return value
    listed = " or ".join(filter(None, [", ".join(map(repr, known[:-1])), repr(known[-1])]))
    hint = did_you_mean(str(value), map(str, known))
    raise ValueError(f"{who}: argument '{name}' must be {listed}, not {value!r}{hint}")


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; did you mean 'x'?" for the closest of ``known``, or "" if none is close.

    >>> did_you_mean("sofmax", ["cog", "softmax"])
    "; did you mean 'softmax'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def shortened(text: str, limit: int = 60) -> str:
    """Return text from the user for a message, cut after ``limit`` characters.

    >>> shortened("exp(s)"), shortened("x" * 100, 5)
    ('exp(s)', 'xxxxx...')
    """
    return text if len(text) <= limit else f"{text[:limit]}..."
