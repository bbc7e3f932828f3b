"""Can the native engine run here? Finding out means compiling, which is tried once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from unsoft.engines.native.binding import kernel
from unsoft.engines.native.compiler import CompilationError
from unsoft.engines.registry import warn_unavailable
from unsoft.tracing import constant_in_graph

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


@constant_in_graph
def formula_failure(formula: str, double: bool) -> str | None:
    """Return None if the formula (its key) is compiled for float32, or float64 if ``double``;
    otherwise the reason why not."""
    return failure((formula, double), lambda: kernel(formula, torch.float64 if double else torch.float32))


def ready(formula: str, double: bool) -> bool:
    """Return whether the formula is compiled; warn if it cannot be."""
    reason = formula_failure(formula, double)
    if reason is not None:
        warn_unavailable("native", reason)
    return reason is None
