"""Makes PyTorch operators of an engine's forward and backward functions.

A fused engine is a pair of plain functions on tensors (see :data:`Forward` and :data:`Backward` for what they take and
return). Here they become operators of the dispatcher, with a shape rule for tracing and a gradient, so that autograd,
``torch.compile`` and ``torch.library.opcheck`` know them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from unsoft.engines.call import Call, compute_dtype

_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor? visible, Tensor? bias, Tensor? counts, Tensor? positions, Tensor params,"
    " Tensor? seed, *,"
    " str formula, SymInt? causal_offset, float scale, float dropout_p) -> (Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? visible, Tensor? bias, Tensor? counts, Tensor? positions,"
    " Tensor params, Tensor? seed, Tensor out, Tensor peak, Tensor total, *, str formula, SymInt? causal_offset, float scale,"
    " float dropout_p, bool need_bias, bool need_params) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Forward(Protocol):
    """Output (B, H, L, Dv), and per row the peak and the total mass (B, H, L), which the backward function gets."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, bias: Tensor | None, counts: Tensor | None,
        positions: Tensor | None, params: Tensor, seed: Tensor | None, *, formula: str, causal_offset: int | None, scale: float, dropout_p: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


class Backward(Protocol):
    """Gradients of q, k, v, bias and params; the last two are empty unless needed."""

    def __call__(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, bias: Tensor | None,
        counts: Tensor | None, positions: Tensor | None, params: Tensor, seed: Tensor | None, out: Tensor, peak: Tensor,
        total: Tensor, *, formula: str, causal_offset: int | None, scale: float, dropout_p: float, need_bias: bool, need_params: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip


def fused_operator(name: str, forward: Forward, backward: Backward) -> Callable[[Call], Tensor]:
    """Registers ``unsoft::<name>`` and ``unsoft::<name>_backward``; returns the function that runs a call on them."""
    library = torch.library
    library.define(f"unsoft::{name}", _FORWARD)
    library.define(f"unsoft::{name}_backward", _BACKWARD)
    library.impl(f"unsoft::{name}", "default", forward)
    library.impl(f"unsoft::{name}_backward", "default", backward)
    library.register_fake(f"unsoft::{name}", _forward_shapes)
    library.register_fake(f"unsoft::{name}_backward", _backward_shapes)
    operator = getattr(torch.ops.unsoft, name).default
    gradient = getattr(torch.ops.unsoft, f"{name}_backward").default

    def setup(ctx: Any, inputs: tuple, keyword_only_inputs: dict, output: tuple) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.options = keyword_only_inputs
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad_out: Tensor | None, *unused: None) -> tuple:
        if grad_out is None:
            return (None,) * 9
        need_bias, need_params = ctx.needs_input_grad[4], ctx.needs_input_grad[7]
        dq, dk, dv, dbias, dparams = gradient(
            grad_out, *ctx.saved_tensors, **ctx.options, need_bias=need_bias, need_params=need_params
        )
        return (
            dq,
            dk,
            dv,
            None,
            dbias if need_bias else None,
            None,
            None,
            dparams if need_params else None,
            None,
        )

    library.register_autograd(f"unsoft::{name}", differentiate, setup_context=setup)
    library.register_autograd(f"unsoft::{name}_backward", _refuse)

    def run(call: Call) -> Tensor:
        tensors, options = call.fused_arguments
        # Nobody listens (no gradient, no tracing): the dispatcher would only cost time, which decoding notices.
        function = forward if _unobserved(tensors) else operator
        return function(*tensors, **options)[0]

    return run


def _refuse(ctx: Any, *unused: Tensor) -> None:
    raise NotImplementedError(
        "unsoft: fused engines have no second derivatives; call attention with engine='dense'"
    )


def _unobserved(tensors: tuple[Tensor | None, ...]) -> bool:
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    ):
        return False
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return not needs_grad and all(x is None or type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    row = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
    return out, row, torch.empty_like(row)


def _backward_shapes(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, bias: Tensor | None,
    counts: Tensor | None, positions: Tensor | None, params: Tensor, *rest: Any, need_bias: bool, need_params: bool, **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dbias = bias.new_empty(bias.shape if need_bias else 0) if bias is not None else params.new_empty(0)
    return dq, dk, dv, dbias, params.new_empty(params.shape if need_params else 0)
