"""Linear attention by Triton kernels, chunk by chunk, forward and backward; the kernels are in
kernel/recurrence.py and kernel/decay.py.

The backward pass computes the states before each chunk again, so that nothing but inputs and outputs is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.linear.attention import largest_one, vanishing
from unsoft.engines.operator import define, refuse
from unsoft.engines.triton.availability import device_of, works
from unsoft.engines.triton.binding import on_device
from unsoft.engines.triton.call_arguments import precision, view
from unsoft.engines.triton.kernel.structures import ChunkFixed, ChunkShape, States, View
from unsoft.engines.triton.launch import INTERPRETED_SIZES, Launch, interpreted, start
from unsoft.engines.triton.tile_sizes import TileSizes

SIZES = {
    "rough": TileSizes(64, 64, 4, 1),
    "float32": TileSizes(64, 32, 4, 1),
    "float64": TileSizes(32, 32, 4, 1),
}
"""Tokens of a chunk and columns of a block, warps and stages, found by compiling for sm_80, sm_90 and gfx942:
no larger ones leave all numbers of a loop in registers."""
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
    """What :func:`unsoft.engines.linear.attention.linear_attention` gives. ``rough``: products in TF32, for
    features of numbers that had no more digits."""
    if logarithmic or (decay is not None and not causal):
        raise ValueError("recurrence: no kernel for logarithms of features, nor for decay without causality")
    if normalise:
        q = largest_one(q)
    options = {"causal": causal, "normalise": normalise, "rough": rough}
    out, after, _ = torch.ops.unsoft.triton_recurrence.default(q, k, v, decay, state, **options)
    return out, after


def kernels_ready(device: str, index: int | None, dtype: torch.dtype) -> bool:
    """Do the kernels for float32 or float64 compile and run on the device? If not, a warning says why."""
    return works(_small_call, device, index, dtype)


def _small_call(device: str, index: int | None, dtype: torch.dtype) -> None:
    """All kernels once."""
    x = torch.ones(1, 1, 1, 1, device=device_of(device, index), dtype=dtype)
    for rough in (False, True):
        options = {"causal": True, "normalise": True, "rough": rough}
        out, _, totals = forward(x, x, x, x[0, 0, 0], None, **options)
        backward(out, None, x, x, x, x[0, 0, 0], None, out, totals, need_decay=True, **options)


# As torch.compiler.assume_constant_result does: a traced caller asks once, while traced.
kernels_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Work:
    """One call, and the kernels for it."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    causal: bool
    normalise: bool
    rough: bool

    @cached_property
    def sizes(self) -> TileSizes:
        if interpreted():
            return INTERPRETED_SIZES
        return SIZES["float64" if self.q.dtype == torch.float64 else "rough" if self.rough else "float32"]

    @property
    def state_heads(self) -> int:
        """A state that decays belongs to a query head."""
        return self.k.shape[1] if self.decay is None else self.q.shape[1]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return len(self.q), self.state_heads, self.q.shape[3], self.v.shape[3] + 1

    @cached_property
    def log_decay(self) -> Tensor | None:
        """log2 d, by torch: a GPU's own is not exact near d = 1. No d^0 is 0 * -inf."""
        if self.decay is None:
            return None
        return self.decay.double().log2().clamp(min=-1e4).to(self.q.dtype)

    def fixed(self, heads: int, read_heads: int, **flags: Any) -> ChunkFixed:
        """For ``heads`` of what is computed and ``read_heads`` of what is read."""
        flags = {"backwards": False, "transposed": False, "totals": False} | flags
        return ChunkFixed(
            feature_width=self.q.shape[3],
            value_width=self.v.shape[3],
            group=self.q.shape[1] // self.k.shape[1],
            members=max(read_heads // heads, 1),
            shared=max(heads // read_heads, 1),
            causal=self.causal,
            decays=self.decay is not None,
            gone=vanishing(self.q.dtype),
            precision=precision(self.q.dtype, self.rough),
            double=self.q.dtype == torch.float64,
            **flags,
        )

    def states(
        self, x: Tensor, y: Tensor, extra: Tensor | None, before: Tensor | None, *, backwards: bool = False
    ) -> tuple[States, Tensor]:
        """The states before each chunk of x and y, or the one that all see, and the state after the last."""
        from unsoft.engines.triton.kernel.recurrence import state_kernel

        (batch, heads, features, columns), tokens = self.state_shape, x.shape[2]
        chunks = -(-tokens // self.sizes.rows) if self.causal else 1
        matrices = x.new_empty(batch, heads, chunks, features, columns - 1)
        states = States(matrices, x.new_empty(batch, heads, chunks, features), chunks)
        after = x.new_empty(self.state_shape)
        arguments = {
            "x": view(x),
            "y": view(y),
            "extra": View(None, (0, 0, 0)) if extra is None else view(extra),
            "log_decay": self.log_decay,
            "start": None if before is None else before.contiguous(),
            "after": after,
            "states": states,
            "shape": ChunkShape(heads, heads, tokens),
            "FIXED": self.fixed(heads, x.shape[1], backwards=backwards),
        }
        blocks = -(-features // self.sizes.keys) * -(-(columns - 1) // self.sizes.keys)
        self._start("state", state_kernel, arguments, (blocks, batch * heads), self.sizes)
        return states, after

    def chunks(
        self, x: Tensor, y: Tensor, z: Tensor, states: States, slopes: Tensor | None, **flags: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows (B, heads of x, tokens of x, columns of z), and the totals they were divided by, if so."""
        from unsoft.engines.triton.kernel.recurrence import chunk_kernel

        (batch, heads, tokens, _), width = x.shape, z.shape[3]
        fixed = self.fixed(heads, y.shape[1], **flags)
        out = x.new_empty(batch, heads, tokens, width)
        totals = x.new_empty(batch, heads, tokens) if fixed.totals else x.new_empty(0)
        arguments = {
            "x": view(x),
            "y": view(y),
            "z": view(z),
            "slopes": View(None, (0, 0, 0)) if slopes is None else view(slopes),
            "log_decay": self.log_decay,
            "states": states,
            "out": view(out),
            "totals": totals if fixed.totals else None,
            "shape": ChunkShape(heads, self.state_heads, tokens),
            "FIXED": fixed,
        }
        blocks = -(-tokens // self.sizes.rows) * -(-width // self.sizes.keys)
        self._start("chunk", chunk_kernel, arguments, (blocks, batch * heads), self.sizes)
        return out, totals

    def decay_gradient(
        self, grad: Tensor, slopes: Tensor | None, states: States, later: States, decay: Tensor
    ) -> Tensor:
        """Of the loss with respect to d (H)."""
        from unsoft.engines.triton.kernel.decay import decay_kernel

        batch, heads, tokens, _ = self.q.shape
        out = self.q.new_empty(batch, heads, states.chunks)
        arguments = {
            "q": view(self.q),
            "k": view(self.k),
            "v": view(self.v),
            "grad": view(grad),
            "slopes": View(None, (0, 0, 0)) if slopes is None else view(slopes),
            "log_decay": self.log_decay,
            "states": states,
            "later": later,
            "out": out,
            "shape": ChunkShape(heads, heads, tokens),
            "FIXED": self.fixed(heads, self.k.shape[1]),
        }
        sizes = self.sizes._replace(keys=min(self.sizes.keys, _DECAY_COLUMNS))
        self._start("decay", decay_kernel, arguments, (states.chunks, batch * heads), sizes)
        return out.sum((0, 2)) / decay

    def _start(
        self, name: str, kernel: Any, arguments: dict[str, Any], grid: tuple[int, int], sizes: TileSizes
    ) -> None:
        start(Launch(name, kernel, arguments, lambda _: grid, "", self.q.dtype, (sizes,)))


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, **options: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the state after the last key, and the sums of the weights of each row (nothing unless
    normalised)."""
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    work = _Work(q, k, v, decay, **options)
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
    out: Tensor,
    totals: Tensor,
    *,
    need_decay: bool,
    **options: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, decay (nothing unless needed) and the state before."""
    grad, q, k, v = (x.resolve_neg() for x in (grad, q, k, v))
    work = _Work(q, k, v, decay, **options)
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
    return dq, dk, dv, d_decay, d_state


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, **options: bool
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
    *unused: Any,
    need_decay: bool,
    **options: bool,
) -> tuple[Tensor, ...]:
    d_decay = q.new_empty(decay.shape if need_decay and decay is not None else (0,))
    d_state = _forward_shapes(q, k, v, decay, None, **options)[1]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_decay, d_state


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    out, _, totals = output
    ctx.save_for_backward(*inputs, out, totals)
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: Tensor | None, grad_after: Tensor | None, unused: None
) -> tuple[Tensor | None, ...]:
    if grad is None and grad_after is None:
        return (None,) * 5
    needed = ctx.needs_input_grad
    grad = torch.zeros_like(ctx.saved_tensors[5]) if grad is None else grad
    run = torch.ops.unsoft.triton_recurrence_backward.default
    found = run(grad, grad_after, *ctx.saved_tensors, **ctx.options, need_decay=needed[3])
    return tuple(x if need else None for x, need in zip(found, needed, strict=True))


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? state"
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
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    backward,
    _backward_shapes,
)
torch.library.register_autograd("unsoft::triton_recurrence", _differentiate, setup_context=_setup)
torch.library.register_autograd("unsoft::triton_recurrence_backward", refuse)
