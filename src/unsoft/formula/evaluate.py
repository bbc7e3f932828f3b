"""Evaluates expressions on tensors, differentiably.

The gradient is not left to autograd's view of each small operation: it is the symbolic derivative, evaluated
in turn, so that it obeys the conventions of :mod:`unsoft.formula.derive`, saves nothing but the inputs, and
can be differentiated again to any order.

>>> import torch
>>> from unsoft.formula.parse import parse
>>> s = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
>>> y = evaluate(parse("max(s, 0)**2 / n"), {"s": s, "n": 2})
>>> y.tolist()
[0.0, 0.0, 2.0]
>>> torch.autograd.grad(y.sum(), s)[0].tolist()
[0.0, 0.0, 2.0]
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from unsoft.formula.expr import Expr
from unsoft.formula.program import values

Value = Tensor | float | int


def evaluate(expr: Expr, env: Mapping[str, Value], *, constants: Collection[str] = ()) -> Tensor:
    """Value of an expression, of the broadcast shape of all tensors in ``env`` and in their floating dtype.

    ``env`` gives each symbol a tensor or a number. Gradients flow to every tensor in it, except those named
    in ``constants``. The result may be a view of a tensor in ``env`` (of s for the expression "s").
    """
    return evaluate_all({"value": expr}, env, constants=constants)["value"]


def evaluate_all(
    outputs: Mapping[str, Expr], env: Mapping[str, Value], *, constants: Collection[str] = ()
) -> dict[str, Tensor]:
    """Values of several expressions at once, their shared parts computed once; see :func:`evaluate`.

    >>> from unsoft.formula.parse import parse
    >>> evaluate_all({"double": parse("2*s"), "half": parse("s/2")}, {"s": 3})
    {'double': tensor(6.), 'half': tensor(1.5000)}
    """
    used = sorted({name for expr in outputs.values() for name in expr.symbols})
    if missing := [name for name in used if name not in env]:
        raise ValueError(f"env: no value for {', '.join(missing)}; given are {', '.join(sorted(env))}")
    tensors = _as_tensors(env)
    # torch.broadcast_shapes would import sympy: 0.5 s
    like: Tensor = torch.broadcast_tensors(*tensors.values())[0]  # type: ignore[no-untyped-call]
    results = values(list(outputs.values()), tensors, frozenset(constants))
    return {
        name: (x if isinstance(x, Tensor) else like.new_full((), x)).expand(like.shape)
        for name, x in zip(outputs, results, strict=True)
    }


def _as_tensors(env: Mapping[str, Value]) -> dict[str, Tensor]:
    """All values as tensors of one floating dtype on one device; at least one tensor."""
    given = [value for value in env.values() if isinstance(value, Tensor)]
    floating = [value.dtype for value in given if value.is_floating_point()]
    dtype = floating[0] if floating else torch.get_default_dtype()
    for other in floating[1:]:
        dtype = torch.promote_types(dtype, other)
    device = given[0].device if given else None
    return {
        name: value.to(dtype)
        if isinstance(value, Tensor)
        else torch.tensor(float(value), dtype=dtype, device=device)
        for name, value in (env or {"": 0}).items()
    }
