"""Plain data of a study, as TOML gives it: each function returns what it was given, or says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_FIXED = ("task", "knobs", "mechanism", "options", "seed")
"""Fields of a run that a study decides in other ways than by settings."""


def as_settings(value: Any) -> dict[str, Any]:
    """Settings that a run has."""
    from dataclasses import fields

    from unsoft.lab.training.spec import Spec

    known = [one.name for one in fields(Spec) if one.name not in _FIXED]
    found = as_table(value, "settings")
    for name in found:
        if name not in known:
            raise ValueError(f"study: a run has no setting {name!r}; it has {', '.join(known)}")
    return found


def check_known(content: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """ValueError if there is a name that is not ``known``."""
    for name in content:
        if name not in known:
            raise ValueError(f"study: {what} has no {name!r}; it has {', '.join(known)}")


def as_table(value: Any, name: str) -> dict[str, Any]:
    """Names with values."""
    if not isinstance(value, dict):
        raise ValueError(f"study: {name!r} must be a table, not {value!r}")
    return dict(value)


def as_tables(value: Any, name: str) -> list[dict[str, Any]]:
    """Several of them."""
    if not isinstance(value, list):
        raise ValueError(f"study: write [[{name}]], which may be repeated, not {value!r}")
    return [as_table(one, name) for one in value]


def as_names(value: Any, name: str) -> list[str]:
    """A list of texts."""
    if not isinstance(value, list):
        raise ValueError(f"study: {name!r} must be a list of names, not {value!r}")
    return [as_text(one, name) for one in value]


def as_text(value: Any, name: str) -> str:
    """
    >>> as_text(3, "label")
    Traceback (most recent call last):
    ValueError: ...
    """
    if not isinstance(value, str):
        raise ValueError(f"study: {name!r} must be a text, not {value!r}")
    return value
