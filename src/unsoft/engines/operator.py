"""Makes PyTorch operators from an engine's forward and backward functions.

A fused engine is a pair of plain functions: from a :class:`Call` to its :class:`Rows`, and from a call and
its :class:`Upstream` to :class:`Gradients`. Here they become operators of the dispatcher, with a shape rule
for tracing and a gradient, for autograd, ``torch.compile`` and ``torch.library.opcheck``. Operators take
tensors and numbers only, so a call is flattened and rebuilt here, and nowhere else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import TENSORS, Call, CallRule, Gradients, Rows, Upstream
from unsoft.formula import Formula

Forward = Callable[[Call], Rows]
Backward = Callable[[Call, Upstream], Gradients]

_ALWAYS = {"q", "k", "v", "params"}
INPUTS = ", ".join(f"Tensor{'' if name in _ALWAYS else '?'} {name}" for name in TENSORS)
OPTIONS = "str rule, SymInt? causal_offset, float scale, float dropout_p, bool strict, bool wide"
_FORWARD = f"({INPUTS}, *, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
_NEEDED = ("bias", "params", "query_fields", "key_fields")
"""Inputs whose gradient is computed only if it is needed."""
_BACKWARD = (
    f"(Tensor grad_out, {INPUTS}, Tensor out, Tensor peak, Tensor total, *, {OPTIONS}, "
    + ", ".join(f"bool need_{name}" for name in _NEEDED)
    + f") -> ({', '.join('Tensor' for _ in Gradients._fields)})"
)
_COUNT = len(TENSORS)


def save_inputs(
    ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None
) -> None:
    """Keep the inputs and options of an operator for its backward pass."""
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def save_all(ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any]) -> None:
    """Keep the results too. Results that nobody differentiates get None instead of zeros."""
    save_inputs(ctx, (*inputs, *output), output, keyword_only_inputs)
    ctx.set_materialize_grads(False)


def _refuse(ctx: Any, *unused: Tensor) -> None:
    raise NotImplementedError(
        "unsoft: fused engines have no second derivatives; call attention with engine='dense'"
    )


def fused_operator(
    name: str, forward: Forward, backward: Backward, read: Callable[[str], CallRule] = Formula.from_key
) -> Callable[[Call], Tensor]:
    """Register ``unsoft::<name>`` and ``unsoft::<name>_backward``; return the function that runs a call on
    them. ``read`` makes the rule from its key."""

    def forward_flat(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        return tuple(forward(Call.from_flat(tensors, read, **options)))

    def backward_flat(grad_out: Tensor, *tensors: Any, **options: Any) -> tuple[Tensor, ...]:
        needs = {f"need_{name}": options.pop(f"need_{name}") for name in _NEEDED}
        call = Call.from_flat(tensors[:_COUNT], read, **options)
        # A wide output has a wide gradient. Products of half precision are faster, and callers that compute
        # further in torch would have rounded it too.
        grad_out = grad_out.to(call.q.dtype)
        return tuple(backward(call, Upstream(grad_out, Rows(*tensors[_COUNT:]), **needs)))

    def differentiate(ctx: Any, grad_out: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            return (None,) * _COUNT
        needed = dict(zip(TENSORS, ctx.needs_input_grad, strict=True))
        needs = {f"need_{name}": needed[name] for name in _NEEDED}
        gradients = Gradients(*gradient(grad_out, *ctx.saved_tensors, **ctx.options, **needs))
        return tuple(getattr(gradients, name, None) if needed[name] else None for name in TENSORS)

    define(name, _FORWARD, forward_flat, _forward_shapes, differentiate, save_all)
    define(f"{name}_backward", _BACKWARD, backward_flat, _backward_shapes)
    operator = getattr(torch.ops.unsoft, name).default
    gradient = getattr(torch.ops.unsoft, f"{name}_backward").default

    def run(call: Call) -> Tensor:
        if not torch.compiler.is_compiling() and is_unobserved(call):
            return forward(call).out  # the dispatcher would only cost time, which small calls notice
        tensors, options = call.flat()
        out: Tensor = operator(*tensors, **options)[0]
        return out

    return run


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    shapes: Callable[..., Any],
    differentiate: Callable[..., Any] = _refuse,
    setup: Callable[..., None] | None = None,
) -> None:
    """Register ``unsoft::<name>`` with its shape rule and gradient; the default is for backward passes."""
    torch.library.define(f"unsoft::{name}", schema)
    torch.library.impl(f"unsoft::{name}", "default", run)
    torch.library.register_fake(f"unsoft::{name}", shapes)
    torch.library.register_autograd(f"unsoft::{name}", differentiate, setup_context=setup)


def is_unobserved(call: Call) -> bool:
    """Return True if there is no gradient to compute, and no mode that has to see torch's operations."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    tensors = [x for x in call.tensors if x is not None]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not needs_grad and all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


# The shape rules make no Call: while tracing, tensors hold no numbers, and making a formula needs some.
def _forward_shapes(*tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    named = dict(zip(TENSORS, tensors, strict=True))
    return tuple(Rows.empty(named["q"], named["v"], options["wide"]))


def _backward_shapes(grad_out: Tensor, *tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    named = dict(zip(TENSORS, tensors[:_COUNT], strict=True))
    always = [named[name].new_empty(named[name].shape) for name in ("q", "k", "v")]
    requested = [named[name] if options[f"need_{name}"] else None for name in _NEEDED]
    return (*always, *(named["params"].new_empty(0 if x is None else x.shape) for x in requested))
