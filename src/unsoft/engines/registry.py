"""Engines by name: one list for each kind of operation, and how one of its engines is chosen."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from unsoft.checks import did_you_mean
from unsoft.errors import CompilerWarning
from unsoft.tracing import constant_in_graph

Work = TypeVar("Work")
"""The argument of the engines of one kind, such as a :class:`unsoft.engines.call.Call`."""
Result = TypeVar("Result")
_warned: set[str] = set()


def no_reason(work: Any) -> None:
    """Return None: the engine supports everything, or is always available."""
    return None


def _prefer_always(work: Any) -> bool:
    return True


@constant_in_graph
def warn_unavailable(name: str, reason: str) -> None:
    """Warn that another engine computes instead of ``name``, once for each reason in a process.

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
    """One implementation of an operation."""

    name: str
    unsupported_reason: Callable[[Work], str | None]
    """None if the engine supports the call, otherwise the reason why not."""
    run: Callable[[Work], Result]
    prefer: Callable[[Work], bool] = _prefer_always
    """Return False for calls that "auto" should leave to a later engine."""
    unavailable_reason: Callable[[Work], str | None] = no_reason
    """None if everything it needs is ready (such as compiled code), otherwise the reason why not."""


class Registry(Generic[Work, Result]):
    """The engines of one kind of operation, the preferred ones first.

    >>> fast = Engine("fast", lambda length: None if length < 10 else "at most 9 keys", lambda length: length)
    >>> registry = Registry([fast, Engine("dense", no_reason, lambda length: length)])
    >>> registry.choose("auto", 3).name, registry.choose("auto", 30).name
    ('fast', 'dense')
    >>> registry.choose("fast", 30)
    Traceback (most recent call last):
    ValueError: attention: argument 'engine': 'fast' does not support this call: at most 9 keys
    """

    def __init__(
        self, engines: Sequence[Engine[Work, Result]], missing: Mapping[str, str] | None = None
    ) -> None:
        """``missing``: names of engines that exist for other operations, with the reason why not for this."""
        self.engines, self._missing = list(engines), dict(missing or {})

    def names(self) -> list[str]:
        """Return what the argument ``engine`` accepts."""
        return ["auto", *(engine.name for engine in self.engines), *self._missing]

    def named(self, name: str) -> Engine[Work, Result]:
        """Return the engine of this name."""
        self.check(name)
        return next(engine for engine in self.engines if engine.name == name)

    def choose(self, name: str, work: Work) -> Engine[Work, Result]:
        """Return the engine called ``name``; for "auto" the first that supports the work, prefers it and is
        available. Raise ValueError if an engine that is requested by name cannot run the work."""
        if name == "auto":
            return next(e for e in self.engines if self._suits(e, work))
        self.check(name)
        engine = None if name in self._missing else self.named(name)
        reason = self._missing[name] if engine is None else engine.unsupported_reason(work)
        if engine is None or reason is not None:
            raise ValueError(f"attention: argument 'engine': {name!r} does not support this call: {reason}")
        if reason := engine.unavailable_reason(work):
            raise ValueError(
                f"attention: argument 'engine': {name!r} is not available here: {reason}; with 'auto' another"
                " engine computes the same results"
            )
        return engine

    def _suits(self, engine: Engine[Work, Result], work: Work) -> bool:
        if engine.unsupported_reason(work) is not None or not engine.prefer(work):
            return False
        reason = engine.unavailable_reason(work)
        if reason is not None:
            warn_unavailable(engine.name, reason)
        return reason is None

    def check(self, name: str) -> None:
        """Raise ValueError or TypeError unless ``name`` is an engine."""
        if name == "auto":
            return
        if not isinstance(name, str):
            raise TypeError(f"attention: argument 'engine' must be a name, not {type(name).__name__}")
        known = self.names()
        if name not in known:
            raise ValueError(
                f"attention: argument 'engine': unknown name {name!r}{did_you_mean(name, known)}"
                f" (known: {', '.join(known)})"
            )


def check_return_weights(return_weights: bool, engine: str) -> None:
    """Raise ValueError if weights are requested from an engine that never forms them."""
    if return_weights and engine not in ("auto", "dense"):
        raise ValueError(
            f"attention: argument 'return_weights' needs engine 'dense' or 'auto', not {engine!r}"
        )
