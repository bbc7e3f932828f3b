"""Can the native engine run here? Finding out means compiling; failure is said once, clearly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch

from unsoft.engines.native.binding import kernel
from unsoft.engines.native.compiler import CompilationError
from unsoft.errors import CompilerWarning

_failed: dict[Hashable, str] = {}


def failure(what: Hashable, compile_it: Callable[[], object]) -> str | None:
    """None if ``compile_it()`` works; otherwise the reason why not, which a warning gives too, once.

    After a failure the same thing is not tried, nor the same reason reported, again in this process.
    """
    if what in _failed:
        return _failed[what]
    try:
        compile_it()
    except CompilationError as error:
        if str(error) not in _failed.values():
            text = (
                f"unsoft's native engine is not available ({error}); the same results are computed by a"
                " slower engine"
            )
            warnings.warn(text, CompilerWarning, stacklevel=3)
        _failed[what] = str(error)
    return _failed.get(what)


def attempt(what: Hashable, compile_it: Callable[[], object]) -> bool:
    """Does ``compile_it()`` work?"""
    return failure(what, compile_it) is None


def ready(formula: str, double: bool) -> bool:
    """Is the formula (its key) compiled for float32, or float64 if ``double``?"""
    return attempt((formula, double), lambda: kernel(formula, torch.float64 if double else torch.float32))


# As torch.compiler.assume_constant_result does, without importing all of dynamo: a traced caller asks once,
# while traced.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]
