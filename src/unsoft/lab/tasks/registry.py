"""The list of tasks. Each file beside this one registers its own; adding a file is enough."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
import threading
from typing import Any, TypeVar

from unsoft.lab.tasks.task import Task

_registered: dict[str, type[Task]] = {}
_discovery = threading.Lock()
_discovered: list[bool] = []

Kind = TypeVar("Kind", bound=type[Task])


def register(kind: Kind) -> Kind:
    """Adds a task, under the name that its class says; a decorator.

    >>> @register
    ... class Again:
    ...     pass
    Traceback (most recent call last):
    TypeError: register: expected a class of unsoft.lab.tasks.Task, not Again
    """
    if not isinstance(kind, type) or not issubclass(kind, Task):
        raise TypeError(
            "register: expected a class of unsoft.lab.tasks.Task,"
            f" not {getattr(kind, '__name__', repr(kind))}"
        )
    for needed in ("name", "tells"):
        if not getattr(kind, needed, ""):
            raise ValueError(f"register: {kind.__name__} has no {needed!r}")
    if not dataclasses.is_dataclass(kind) or "__dataclass_params__" not in vars(kind):
        raise TypeError(f"register: {kind.__name__} must be a dataclass(frozen=True, kw_only=True)")
    for knob in dataclasses.fields(kind):
        if knob.default is dataclasses.MISSING and knob.default_factory is dataclasses.MISSING:
            raise TypeError(f"register: the knob {knob.name!r} of {kind.__name__} needs a default")
    if _registered.get(kind.name, kind) is not kind:
        raise ValueError(f"register: a task called {kind.name!r} exists already")
    _registered[kind.name] = kind
    return kind


def tasks() -> dict[str, type[Task]]:
    """Every task by name, in order."""
    with _discovery:
        if not _discovered:
            package = importlib.import_module("unsoft.lab.tasks")
            for found in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"unsoft.lab.tasks.{found.name}")
            _discovered.append(True)
    return dict(sorted(_registered.items()))


def task(name: str, **knobs: Any) -> Task:
    """The task called ``name``, with another difficulty if knobs are given.

    >>> task("copy", length=8).length
    8
    >>> task("recal")
    Traceback (most recent call last):
    ValueError: task: no task is called 'recal'; did you mean 'recall'?
    >>> task("copy", lenght=8)
    Traceback (most recent call last):
    ValueError: copy: no knob is called 'lenght'; there are length, vocabulary
    """
    known = tasks()
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
        raise ValueError(f"task: no task is called {name!r}; {hint}")
    kind = known[name]
    there = [field.name for field in dataclasses.fields(kind)]
    for knob in knobs:
        if knob not in there:
            raise ValueError(f"{name}: no knob is called {knob!r}; there are {', '.join(there)}")
    return kind(**knobs)
