"""Engines by name: one list for each kind of operation, and how one of its engines is chosen."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Work = TypeVar("Work")
"""What an engine of this kind is given, such as a :class:`unsoft.engines.call.Call`."""
Result = TypeVar("Result")


def _always(work: Any) -> bool:
    return True


@dataclass(frozen=True)
class Engine(Generic[Work, Result]):
    """One way of computing something."""

    name: str
    supports: Callable[[Work], str | None]
    """None if the engine can do the work, otherwise the reason why not."""
    run: Callable[[Work], Result]
    pays: Callable[[Work], bool] = _always
    """Would ``auto`` want it for this work, if it is the first that supports it?"""
    ready: Callable[[Work], bool] = _always
    """Could everything it needs be prepared?

    If not, a warning has been given and the next engine takes over.
    """


class Registry(Generic[Work, Result]):
    """The engines of one kind of operation, the preferred ones first.

    >>> twice = Engine("fast", lambda x: None if x < 10 else "it counts on fingers", lambda x: x + x)
    >>> registry = Registry([twice, Engine("sure", lambda x: None, lambda x: 2 * x)], fallback="sure")
    >>> registry.choose("auto", 3).name, registry.choose("auto", 30).name
    ('fast', 'sure')
    >>> registry.choose("fast", 30)
    Traceback (most recent call last):
    ValueError: attention: argument 'engine': 'fast' does not support this call: it counts on fingers
    """

    def __init__(self, engines: Sequence[Engine[Work, Result]], *, fallback: str) -> None:
        """``fallback``: the engine that stands in for one that was asked for and is not ready."""
        self.engines = list(engines)
        self.fallback = fallback

    def names(self) -> list[str]:
        """What the argument ``engine`` accepts."""
        return ["auto", *(engine.name for engine in self.engines)]

    def named(self, name: str) -> Engine[Work, Result]:
        """The engine of this name."""
        self.check(name)
        return next(engine for engine in self.engines if engine.name == name)

    def choose(self, name: str, work: Work) -> Engine[Work, Result]:
        """The engine called ``name``, or for "auto" the first that supports the work, pays and is ready."""
        if name == "auto":
            return next(
                e for e in self.engines if e.supports(work) is None and e.pays(work) and e.ready(work)
            )
        engine = self.named(name)
        if reason := engine.supports(work):
            raise ValueError(f"attention: argument 'engine': {name!r} does not support this call: {reason}")
        return engine if engine.ready(work) else self.named(self.fallback)

    def check(self, name: str) -> None:
        """ValueError or TypeError unless ``name`` is an engine."""
        if name == "auto":
            return
        if not isinstance(name, str):
            raise TypeError(f"attention: argument 'engine' must be a name, not {type(name).__name__}")
        known = self.names()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"attention: argument 'engine': unknown name {name!r}{hint} (known: {', '.join(known)})"
            )


def check_return_weights(return_weights: bool, engine: str) -> None:
    """ValueError if weights are asked of an engine that never forms them."""
    if return_weights and engine not in ("auto", "dense"):
        raise ValueError(
            f"attention: argument 'return_weights' needs engine 'dense' or 'auto', not {engine!r}"
        )
