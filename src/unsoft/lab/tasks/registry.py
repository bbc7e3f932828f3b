"""Registry of tasks. Each file of this folder registers its own, so adding a file is enough."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from functools import cache
from typing import Any, TypeVar

from unsoft.checks import did_you_mean
from unsoft.lab.tasks.task import Task

_registered: dict[str, type[Task]] = {}

Kind = TypeVar("Kind", bound=type[Task])


def register(kind: Kind) -> Kind:
    """Register a task class under its ``name``; a decorator.

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
    """Return every task class by name, sorted."""
    _import_all()
    return dict(sorted(_registered.items()))


@cache
def _import_all() -> None:
    """Import the file of every task. Threads that come here together import each file once."""
    package = importlib.import_module("unsoft.lab.tasks")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"unsoft.lab.tasks.{module.name}")


def task(name: str, **knobs: Any) -> Task:
    """Return the task called ``name``, with the difficulty that the knobs set.

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
        hint = did_you_mean(str(name), known) or f"; there are {', '.join(known)}"
        raise ValueError(f"task: no task is called {name!r}{hint}")
    kind = known[name]
    names = [field.name for field in dataclasses.fields(kind)]
    for knob in knobs:
        if knob not in names:
            raise ValueError(f"{name}: no knob is called {knob!r}; there are {', '.join(names)}")
    return kind(**knobs)
