"""Compiled code that may be missing: loads the libraries of the kernel folder, and remembers failures.

Whether code can be compiled is only known after trying, and is tried once in a process.
"""

import ctypes
from collections.abc import Callable, Hashable
from functools import cache

import torch

from unsoft.engines.native.binding import kernel
from unsoft.engines.native.compiler import KERNEL, CompilationError, load_libraries
from unsoft.engines.registry import warn_unavailable
from unsoft.tracing import constant_in_graph

_SOURCES = {
    "delta": "delta.cpp",
    "density": "density/library.cpp",
    "gaussian": "gaussian/library.cpp",
    "pairs": "pairs.cpp",
    "recurrence": "recurrence.cpp",
}
_failed: dict[Hashable, str] = {}


def failure(what: Hashable, compile_it: Callable[[], object]) -> str | None:
    """Return None if ``compile_it()`` works, otherwise the reason why not.

    After a failure the same thing is not tried again in this process.
    """
    if what in _failed:
        return _failed[what]
    try:
        compile_it()
    except CompilationError as error:
        _failed[what] = str(error)
    return _failed.get(what)


@cache
def library(name: str, double: bool) -> ctypes.CDLL:
    """Return a library that is the same for every formula, for float32, or float64 if ``double``."""
    source = (KERNEL / _SOURCES[name]).read_text()
    (loaded,) = load_libraries({name: source}, "double" if double else "float")
    return loaded


def library_failure(name: str, double: bool) -> str | None:
    """Return None if :func:`library` can be loaded, otherwise the reason why not."""
    return failure((name, double), lambda: library(name, double))


@constant_in_graph
def formula_failure(formula: str, double: bool) -> str | None:
    """Return None if the formula (its key) is compiled for float32, or float64 if ``double``;
    otherwise the reason why not."""
    return failure((formula, double), lambda: kernel(formula, torch.float64 if double else torch.float32))


def ready(formula: str, double: bool) -> bool:
    """Return True if the formula is compiled; warn if it cannot be."""
    reason = formula_failure(formula, double)
    if reason is not None:
        warn_unavailable("native", reason)
    return reason is None
