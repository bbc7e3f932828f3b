"""What code has to know of torch.func transforms (vmap, grad, jvp, ...) that it is called in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Run code as if no transform were around it: for what outlives the call, such as modules and formulas.

    >>> draw = outside_transforms()(torch.rand)
    >>> torch.vmap(lambda x: x * draw(()))(torch.ones(2)).shape          # vmap itself refuses random numbers
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
    """Return whether Python code may branch on the numbers of the tensors. It may not under vmap, where one
    tensor stands for many.

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
