"""Engines by name: one list for each kind of operation, and how one of its engines is chosen."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from unsoft.errors import CompilerWarning
from unsoft.tracing import constant_in_graph

Work = TypeVar("Work")
"""What an engine of this kind is given, such as a :class:`unsoft.engines.call.Call`."""
Result = TypeVar("Result")


_warned: set[str] = set()


def _always(work: Any) -> bool:
    return True


def _nothing(work: Any) -> None:
    return None


@constant_in_graph
def warn_unavailable(name: str, reason: str) -> None:
    """Warn that another engine computes in place of ``name``; once for each reason in a process.

    Where warnings are errors, as in the checks of ``unsoft doctor --gpu``, every call raises.
    """
    if reason not in _warned:
        text = (
            f"unsoft's engine {name!r} is not available ({reason}); a slower engine computes the same results"
        )
        warnings.warn(text, CompilerWarning, stacklevel=3)
        _warned.add(reason)


@dataclass(frozen=True)
class Engine(Generic[Work, Result]):
    """One way of computing something."""

    name: str
    supports: Callable[[Work], str | None]
    """None if the engine can do the work, otherwise the reason why not."""
    run: Callable[[Work], Result]
    pays: Callable[[Work], bool] = _always
    """Would ``auto`` want it for this work, if it is the first that supports it?"""
    unavailable: Callable[[Work], str | None] = _nothing
    """None if everything it needs could be prepared (such as compiled code), otherwise the reason why not."""


class Registry(Generic[Work, Result]):
    """The engines of one kind of operation, the preferred ones first.

    >>> twice = Engine("fast", lambda x: None if x < 10 else "it counts on fingers", lambda x: x + x)
    >>> registry = Registry([twice, Engine("sure", lambda x: None, lambda x: 2 * x)])
    >>> registry.choose("auto", 3).name, registry.choose("auto", 30).name
    ('fast', 'sure')
    >>> registry.choose("fast", 30)
    Traceback (most recent call last):
    ValueError: attention: argument 'engine': 'fast' does not support this call: it counts on fingers
    """

    def __init__(self, engines: Sequence[Engine[Work, Result]]) -> None:
        self.engines = list(engines)

    def names(self) -> list[str]:
        """What the argument ``engine`` accepts."""
        return ["auto", *(engine.name for engine in self.engines)]

    def named(self, name: str) -> Engine[Work, Result]:
        """The engine of this name."""
        self.check(name)
        return next(engine for engine in self.engines if engine.name == name)

    def choose(self, name: str, work: Work) -> Engine[Work, Result]:
        """Return the engine called ``name``, or for "auto" the first that supports the work, pays and is
        available. Raise ValueError if an engine that is named cannot run the work."""
        if name == "auto":
            return next(e for e in self.engines if self._suits(e, work))
        engine = self.named(name)
        if reason := engine.supports(work):
            raise ValueError(f"attention: argument 'engine': {name!r} does not support this call: {reason}")
        if reason := engine.unavailable(work):
            raise ValueError(
                f"attention: argument 'engine': {name!r} is not available here: {reason}; with 'auto' another"
                " engine computes the same results"
            )
        return engine

    def _suits(self, engine: Engine[Work, Result], work: Work) -> bool:
        if engine.supports(work) is not None or not engine.pays(work):
            return False
        reason = engine.unavailable(work)
        if reason is not None:
            warn_unavailable(engine.name, reason)
        return reason is None

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
