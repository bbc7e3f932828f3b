"""Functions that torch.compile evaluates while it traces, instead of tracing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant_in_graph(function: F) -> F:
    """Mark ``function`` as a constant of the graph: Dynamo calls it once while tracing and keeps the result.

    The arguments must be constants too, such as a formula or a dtype, and the result must not be a tensor.

    >>> @constant_in_graph
    ... def kernel_name(formula: str) -> str:
    ...     return f"kernel_{formula}"
    >>> kernel_name("cog")
    'kernel_cog'
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
