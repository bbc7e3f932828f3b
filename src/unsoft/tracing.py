"""Calls inside torch.compile and torch.func transforms (vmap, grad, jvp, ...): marks and queries."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

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


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Run code as if no transform were active, to create objects that outlive the call, such as modules.

    >>> draw = outside_transforms()(torch.rand)
    >>> torch.vmap(lambda x: x * draw(()))(torch.ones(2)).shape  # vmap itself raises for random numbers
    torch.Size([2])
    """
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def transform_name() -> str | None:
    """Return the name of the innermost transform or forward-mode derivative around this call.

    >>> torch.func.grad(lambda x: (print(transform_name()), x)[1])(torch.ones(()))
    torch.func.grad
    tensor(1.)
    """
    if torch.compiler.is_compiling():
        return None
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None:
        return f"torch.func.{interpreter.key().name.lower()}"
    return "torch.autograd.forward_ad" if torch.autograd.forward_ad._current_level >= 0 else None


def readable(*tensors: Tensor) -> bool:
    """Return True if Python code may branch on values of the tensors. Under vmap there are several values.

    >>> torch.vmap(lambda x: x if readable(x) else -x)(torch.ones(2))
    tensor([-1., -1.])
    """
    if torch.compiler.is_compiling():  # callers have rules of their own for it
        return True
    functorch = torch._C._functorch
    for x in tensors:
        while functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_batchedtensor(x):
                return False
            x = functorch.get_unwrapped(x)
    return True
