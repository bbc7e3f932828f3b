"""Linear attention by Triton kernels, chunk by chunk, forward and backward, as one operator.

The backward pass recomputes the states before each chunk, so that only inputs and outputs are kept.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.linear.attention import largest_one, vanishing
from unsoft.engines.linear.chunks import cut, in_order
from unsoft.engines.operator import define, save_all
from unsoft.engines.triton import logarithms
from unsoft.engines.triton.availability import device_of, first_failure
from unsoft.engines.triton.launch import (
    TileSizes,
    architecture,
    interpreted,
    on_device,
    precision,
    start_on,
    usual_or_small,
    views,
)
from unsoft.engines.triton.structures import ChunkFixed, ChunkShape, States
from unsoft.tracing import constant_in_graph

SIZES = {
    "rough": TileSizes(64, 64, 4, 1),
    "float32": TileSizes(64, 32, 4, 1),
    "float64": TileSizes(32, 32, 4, 1),
}
"""Tokens of a chunk and columns of a block, warps and stages: the largest that keep all numbers of a loop in
registers when compiled for the targets of the tests."""
_DECAY_COLUMNS = 32


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
    """Return what :func:`unsoft.engines.linear.attention.linear_attention` returns. ``rough``: multiply in
    TF32, enough for features of inputs with few digits."""
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
    """Return why the kernels for float32 or float64 do not compile or run on the device, None if they do."""
    return first_failure(_run_all_kernels, device, index, dtype)


def _run_all_kernels(device: str, index: int | None, dtype: torch.dtype) -> None:
    x = torch.ones(1, 1, 1, 1, device=device_of(device, index), dtype=dtype)
    inputs = (x, x, x, x[0, 0, 0], None, None, None)
    for rough in (False, True):
        options = {"causal": True, "normalise": True, "rough": rough}
        out, _, totals = _forward(*inputs, **options)
        _backward(out, None, *inputs, out, totals, need_decay=True, **options)
    two = x.expand(-1, -1, 2, -1).detach().requires_grad_()
    with torch.enable_grad():
        recurrence(two, two, two, causal=True, normalise=True, logarithmic=True)[0].sum().backward()


@dataclass(frozen=True)
class ChunkWork:
    """The inputs of the operator, and the kernels that run on them."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    state: Tensor | None
    """Before the first token."""
    weights: Tensor | None
    """Inside chunks, if features are logarithms."""
    kept: Tensor | None
    causal: bool
    normalise: bool
    rough: bool

    @cached_property
    def sizes(self) -> TileSizes:
        kind = "float64" if self.q.dtype == torch.float64 else "rough" if self.rough else "float32"
        sizes = usual_or_small(SIZES[kind])
        return sizes if self.weights is None else sizes._replace(rows=self.weights.shape[3])

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """(B, heads, F, Dv + 1). A state that decays belongs to a query head, otherwise to a key head."""
        heads = self.k.shape[1] if self.decay is None else self.q.shape[1]
        return len(self.q), heads, self.q.shape[3], self.v.shape[3] + 1

    @cached_property
    def log_decay(self) -> Tensor | None:
        """log2 d, by torch: a GPU's own log2 is inexact near d = 1. Clamped, so that d^0 = 1 also for d = 0,
        where 0 * -inf would be NaN."""
        if self.decay is None:
            return None
        return self.decay.double().log2().clamp(min=-1e4).to(self.q.dtype)

    def fixed(self, heads: int, read_heads: int, **flags: Any) -> ChunkFixed:
        """Return the constants of a kernel that computes ``heads`` from ``read_heads``."""
        flags = {"backwards": False, "transposed": False, "totals": False} | flags
        inside = self.causal and not (self.weights is not None and flags["transposed"])
        return ChunkFixed(
            feature_width=self.q.shape[3],
            value_width=self.v.shape[3],
            group=self.q.shape[1] // self.k.shape[1],
            members=max(read_heads // heads, 1),
            shared=max(heads // read_heads, 1),
            causal=self.causal,
            inside=inside,
            decays=self.decay is not None,
            gone=vanishing(self.q.dtype),
            precision=precision(self.q.dtype, self.rough),
            double=self.q.dtype == torch.float64,
            **flags,
        )

    def states(
        self, x: Tensor, y: Tensor, extra: Tensor | None, before: Tensor | None, *, backwards: bool = False
    ) -> tuple[States, Tensor]:
        """Return the states before each chunk of x and y (one for all rows unless causal), and the state
        after the last."""
        from unsoft.engines.triton.kernel.recurrence import state_kernel

        (batch, heads, features, columns), tokens = self.state_shape, x.shape[2]
        chunks = -(-tokens // self.sizes.rows) if self.causal else 1
        matrices = x.new_empty(batch, heads, chunks, features, columns - 1)
        states = States(matrices, x.new_empty(batch, heads, chunks, features), chunks)
        after = x.new_empty(self.state_shape)
        blocks = -(-features // self.sizes.keys) * -(-(columns - 1) // self.sizes.keys)
        kept, start = (None if x is None else x.contiguous() for x in (self.kept, before))
        own: dict[str, Any] = {"kept": kept, "start": start, "after": after, "states": states}
        fixed, shape = self.fixed(heads, x.shape[1], backwards=backwards), ChunkShape(heads, heads, tokens)
        own |= views(x=x, y=y, extra=extra)
        self._start(state_kernel, (blocks, batch * heads), self.sizes, shape=shape, FIXED=fixed, **own)
        return states, after

    def _start(self, kernel: Any, grid: tuple[int, int], sizes: TileSizes, **arguments: Any) -> None:
        start_on(self.q, kernel, grid, sizes, log_decay=self.log_decay, **arguments)

    def chunks(
        self, x: Tensor, y: Tensor, z: Tensor, states: States, slopes: Tensor | None, **flags: Any
    ) -> tuple[Tensor, Tensor]:
        """Return rows (B, heads of x, tokens of x, columns of z), and the totals they were divided by, if
        so."""
        from unsoft.engines.triton.kernel.recurrence import chunk_kernel

        (batch, heads, tokens, _), width = x.shape, z.shape[3]
        fixed = self.fixed(heads, y.shape[1], **flags)
        out = x.new_empty(batch, heads, tokens, width)
        totals = x.new_empty(batch, heads, tokens) if fixed.totals else x.new_empty(0)
        sizes = self.sizes._replace(warps=self.sizes.warps * self._more_warps(fixed))
        grid = (-(-tokens // sizes.rows) * -(-width // sizes.keys), batch * heads)
        own: dict[str, Any] = {"states": states, "totals": totals if fixed.totals else None}
        shape = ChunkShape(heads, self.state_shape[1], tokens)
        own |= views(x=x, y=y, z=z, slopes=slopes, weights_in=self.weights, out=out)
        self._start(chunk_kernel, grid, sizes, shape=shape, FIXED=fixed, **own)
        return out, totals

    def _more_warps(self, fixed: ChunkFixed) -> int:
        """Return by which factor a gradient needs more warps on Blackwell, where the usual number has too few
        registers for the numbers of its loop; found by compiling."""
        target = "" if interpreted() else architecture(torch.cuda.current_device())
        if target.startswith("sm_10") and fixed.backwards:
            wide = max(fixed.feature_width, fixed.value_width) > self.sizes.keys
            return 4 if wide and fixed.decays and not fixed.transposed else 2
        return 2 if target.startswith("sm_12") and fixed.transposed and self.weights is not None else 1

    def decay_gradient(
        self, grad: Tensor, slopes: Tensor | None, states: States, later: States, decay: Tensor
    ) -> Tensor:
        """Return the gradient of d (H)."""
        from unsoft.engines.triton.kernel.recurrence import decay_kernel

        batch, heads, tokens, _ = self.q.shape
        out = self.q.new_empty(batch, heads, states.chunks)
        sizes = self.sizes._replace(keys=min(self.sizes.keys, _DECAY_COLUMNS))
        own: dict[str, Any] = {"states": states, "later": later, "out": out}
        own |= views(q=self.q, k=self.k, v=self.v, grad=grad, slopes=slopes)
        fixed, shape = self.fixed(heads, self.k.shape[1]), ChunkShape(heads, heads, tokens)
        self._start(decay_kernel, (states.chunks, batch * heads), sizes, shape=shape, FIXED=fixed, **own)
        return out.sum((0, 2)) / decay


def _work(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> ChunkWork:
    return ChunkWork(q.resolve_neg(), k.resolve_neg(), v.resolve_neg(), *others, **options)


def _forward(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the state after the last key, and the sums of the weights of each row (empty unless
    normalised)."""
    work = _work(*inputs, **options)
    with on_device(work.q):
        states, after = work.states(work.k, work.v, None, work.state)
        out, totals = work.chunks(work.q, work.k, work.v, states, None, totals=work.normalise)
    return out, after, totals


def _backward(
    grad: Tensor, grad_after: Tensor | None, *saved: Any, need_decay: bool, **options: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, decay (empty unless needed), the state before and the weights."""
    *inputs, out, totals = saved
    work, grad, slopes = _work(*inputs, **options), grad.resolve_neg(), None
    q, k, v = work.q, work.k, work.v
    if work.normalise:
        gone = totals.abs() < vanishing(q.dtype)
        inverse = torch.where(gone, 0.0, 1 / torch.where(gone, 1.0, totals))
        slopes = -(grad * out).sum(-1) * inverse
        grad = grad * inverse[..., None]
    with on_device(q):
        states, _ = work.states(k, v, None, work.state)
        extra = torch.zeros_like(grad[..., 0]) if slopes is None else slopes
        later, d_state = work.states(q, grad, extra, grad_after, backwards=True)
        dq, _ = work.chunks(grad, v, k, states, slopes, transposed=True)
        dk, _ = work.chunks(v, grad, q, later, slopes, backwards=True, transposed=True)
        dv, _ = work.chunks(k, q, grad, later, None, backwards=True)
        d_decay = d_weights = q.new_empty(0)
        if need_decay and work.decay is not None:
            d_decay = work.decay_gradient(grad, slopes, states, later, work.decay)
    if work.weights is not None:
        d_weights = _weight_gradient(grad, extra, v, work.weights.shape[3])
    return dq, dk, dv, d_decay, d_state, d_weights


def _weight_gradient(grad: Tensor, slopes: Tensor, v: Tensor, size: int) -> Tensor:
    """Return the gradient of the weights inside chunks of ``size`` tokens: (B, H, L, size)."""
    length, shared, group = v.shape[2], v.shape[1], grad.shape[1] // v.shape[1]
    square = cut(grad, size, shared) @ cut(v, size).mT + cut(slopes[..., None], size, shared)
    return in_order(square.unflatten(3, (group, size)).tril().flatten(3, 4), group, length)


def _forward_shapes(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    work = ChunkWork(*inputs, **options)
    rows = work.q.shape[:3]
    totals = work.q.new_empty(rows if work.normalise else (0,))
    return work.q.new_empty(*rows, work.v.shape[3]), work.q.new_empty(work.state_shape), totals


def _backward_shapes(
    grad: Tensor, grad_after: Tensor | None, *saved: Any, need_decay: bool, **options: Any
) -> tuple[Tensor, ...]:
    work = ChunkWork(*saved[:-2], **options)
    d_decay = work.q.new_empty(work.decay.shape if need_decay and work.decay is not None else (0,))
    d_weights = work.q.new_empty(0 if work.weights is None else work.weights.shape)
    dqkv = (x.new_empty(x.shape) for x in (work.q, work.k, work.v))
    return *dqkv, d_decay, work.q.new_empty(work.state_shape), d_weights


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    out, _, totals = output
    save_all(ctx, inputs, (out, totals), keyword_only_inputs)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_after: Tensor | None, unused: None
) -> tuple[Tensor | None, ...]:
    if grad is None and grad_after is None:
        return (None,) * 7
    needed = ctx.needs_input_grad
    grad = torch.zeros_like(ctx.saved_tensors[-2]) if grad is None else grad
    run = torch.ops.unsoft.triton_recurrence_backward.default
    gradients = run(grad, grad_after, *ctx.saved_tensors, **ctx.options, need_decay=needed[3])
    return *(x if need else None for x, need in zip(gradients, needed[:-1], strict=True)), None


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? state, Tensor? weights, Tensor? kept"
_OPTIONS = "bool causal, bool normalise, bool rough"
define(
    "triton_recurrence",
    f"({_INPUTS}, *, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_shapes,
    _differentiate,
    _setup,
)
define(
    "triton_recurrence_backward",
    f"(Tensor grad, Tensor? grad_after, {_INPUTS}, Tensor out, Tensor totals, *, {_OPTIONS}, bool need_decay)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_shapes,
)
