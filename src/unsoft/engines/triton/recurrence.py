"""Linear attention by Triton kernels, chunk by chunk, forward and backward, as one operator.

The backward pass computes the states before each chunk again, so that nothing but inputs and outputs is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsoft.engines.linear.attention import largest_one, vanishing
from unsoft.engines.linear.chunks import cut, in_order
from unsoft.engines.operator import define, refuse
from unsoft.engines.triton import logarithms
from unsoft.engines.triton.availability import device_of, first_failure
from unsoft.engines.triton.binding import on_device
from unsoft.engines.triton.chunks import ChunkWork
from unsoft.tracing import constant_in_graph


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    normalise: bool,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    logarithmic: bool = False,
    rough: bool = False,
) -> tuple[Tensor, Tensor]:
    """What :func:`unsoft.engines.linear.attention.linear_attention` gives. ``rough``: products in TF32, for
    features of numbers that had no more digits."""
    if decay is not None and not causal:
        raise ValueError("recurrence: no kernel for decay without causality")
    if logarithmic:
        return logarithms.attention(q, k, v, causal=causal, state=state, rough=rough)
    if normalise:
        q = largest_one(q)
    options = {"causal": causal, "normalise": normalise, "rough": rough}
    out, after, _ = torch.ops.unsoft.triton_recurrence.default(q, k, v, decay, state, None, None, **options)
    return out, after


@constant_in_graph
def kernels_failure(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why the kernels for float32 or float64 do not compile or run on the device; None if they do."""
    return first_failure(_small_call, device, index, dtype)


def _small_call(device: str, index: int | None, dtype: torch.dtype) -> None:
    """All kernels once."""
    x = torch.ones(1, 1, 1, 1, device=device_of(device, index), dtype=dtype)
    for rough in (False, True):
        options = {"causal": True, "normalise": True, "rough": rough}
        out, _, totals = forward(x, x, x, x[0, 0, 0], None, None, None, **options)
        backward(out, None, x, x, x, x[0, 0, 0], None, None, None, out, totals, need_decay=True, **options)
    two = x.expand(-1, -1, 2, -1).detach().requires_grad_()
    with torch.enable_grad():
        recurrence(two, two, two, causal=True, normalise=True, logarithmic=True)[0].sum().backward()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    weights: Tensor | None,
    kept: Tensor | None,
    **options: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the state after the last key, and the sums of the weights of each row (nothing unless
    normalised). ``weights`` and ``kept``: see logarithms.py."""
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    work = ChunkWork(q, k, v, decay, weights, kept, **options)
    with on_device(q):
        states, after = work.states(k, v, None, state)
        out, totals = work.chunks(q, k, v, states, None, totals=work.normalise)
    return out, after, totals


def backward(
    grad: Tensor,
    grad_after: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    weights: Tensor | None,
    kept: Tensor | None,
    out: Tensor,
    totals: Tensor,
    *,
    need_decay: bool,
    **options: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, decay (nothing unless needed), the state before and the weights."""
    grad, q, k, v = (x.resolve_neg() for x in (grad, q, k, v))
    work = ChunkWork(q, k, v, decay, weights, kept, **options)
    slopes = None
    if work.normalise:
        gone = totals.abs() < vanishing(q.dtype)
        inverse = torch.where(gone, 0.0, 1 / torch.where(gone, 1.0, totals))
        slopes = -(grad * out).sum(-1) * inverse
        grad = grad * inverse[..., None]
    with on_device(q):
        states, _ = work.states(k, v, None, state)
        extra = torch.zeros_like(grad[..., 0]) if slopes is None else slopes
        later, d_state = work.states(q, grad, extra, grad_after, backwards=True)
        dq, _ = work.chunks(grad, v, k, states, slopes, transposed=True)
        dk, _ = work.chunks(v, grad, q, later, slopes, backwards=True, transposed=True)
        dv, _ = work.chunks(k, q, grad, later, None, backwards=True)
        d_decay = q.new_empty(0)
        if need_decay and decay is not None:
            d_decay = work.decay_gradient(grad, slopes, states, later, decay)
    d_weights = q.new_empty(0) if weights is None else _of_weights(grad, extra, v, weights.shape[3])
    return dq, dk, dv, d_decay, d_state, d_weights


def _of_weights(grad: Tensor, slopes: Tensor, v: Tensor, size: int) -> Tensor:
    """The gradient of the weights inside chunks of ``size`` tokens: (B, H, L, size)."""
    length, shared, group = v.shape[2], v.shape[1], grad.shape[1] // v.shape[1]
    found = cut(grad, size, shared) @ cut(v, size).mT + cut(slopes[..., None], size, shared)
    return in_order(found.unflatten(3, (group, size)).tril().flatten(3, 4), group, length)


def _forward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    weights: Tensor | None,
    kept: Tensor | None,
    **options: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[1] if decay is None else q.shape[1]
    after = q.new_empty(q.shape[0], heads, q.shape[3], v.shape[3] + 1)
    totals = q.new_empty(q.shape[:3] if options["normalise"] else (0,))
    return q.new_empty(*q.shape[:3], v.shape[3]), after, totals


def _backward_shapes(
    grad: Tensor,
    grad_after: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    weights: Tensor | None,
    *unused: Any,
    need_decay: bool,
    **options: bool,
) -> tuple[Tensor, ...]:
    d_decay = q.new_empty(decay.shape if need_decay and decay is not None else (0,))
    d_state = _forward_shapes(q, k, v, decay, state, weights, None, **options)[1]
    d_weights = q.new_empty(0 if weights is None else weights.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_decay, d_state, d_weights


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    out, _, totals = output
    ctx.save_for_backward(*inputs, out, totals)
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_after: Tensor | None, unused: None
) -> tuple[Tensor | None, ...]:
    if grad is None and grad_after is None:
        return (None,) * 7
    needed = ctx.needs_input_grad
    grad = torch.zeros_like(ctx.saved_tensors[-2]) if grad is None else grad
    run = torch.ops.unsoft.triton_recurrence_backward.default
    found = run(grad, grad_after, *ctx.saved_tensors, **ctx.options, need_decay=needed[3])
    return *(x if need else None for x, need in zip(found, needed[:-1], strict=True)), None


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? state, Tensor? weights, Tensor? kept"
_OPTIONS = "bool causal, bool normalise, bool rough"
define(
    "triton_recurrence",
    f"({_INPUTS}, *, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    forward,
    _forward_shapes,
)
define(
    "triton_recurrence_backward",
    f"(Tensor grad, Tensor? grad_after, {_INPUTS}, Tensor out, Tensor totals, *, {_OPTIONS}, bool need_decay)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    backward,
    _backward_shapes,
)
torch.library.register_autograd("unsoft::triton_recurrence", _differentiate, setup_context=_setup)
torch.library.register_autograd("unsoft::triton_recurrence_backward", refuse)
