"""Functions that ``torch.compile`` calls as they are: loops over systems and compiled code of our own are not
for it to trace. Nor does autocast reach into them: a matrix of similarities in bfloat16 is not positive
definite, and the compiled code takes float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, TypeVar

import torch

from unsoft.tracing import constant_in_graph

F = TypeVar("F", bound=Callable[..., Any])


def full_precision(function: F) -> F:
    """Disable autocast inside the function."""

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if not kinds:
            return function(*arguments, **options)
        with ExitStack() as off:
            for kind in kinds:
                off.enter_context(torch.autocast(kind, enabled=False))
            return function(*arguments, **options)

    return run  # type: ignore[return-value]


def untraced(function: F) -> F:
    """Exclude the function from torch.compile. ``torch.compiler.disable`` imports all of dynamo, so it is
    called only when something is compiled."""

    name, function = function.__name__, full_precision(function)
    _functions[name] = function

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_exporting():
            raise ValueError(
                "export: magnitude solves systems by loops and compiled code, which torch.export and ONNX"
                " cannot write down; export a mechanism without it, such as the one after 'magnitude+'"
            )
        if torch.compiler.is_compiling() and _prepare(name):
            return _disabled[name](*arguments, **options)
        return function(*arguments, **options)

    return run  # type: ignore[return-value]


_functions: dict[str, Callable[..., Any]] = {}
_disabled: dict[str, Callable[..., Any]] = {}


@constant_in_graph
def _prepare(name: str) -> bool:
    if name not in _disabled:
        _disabled[name] = torch.compiler.disable(_functions[name])
    return True
