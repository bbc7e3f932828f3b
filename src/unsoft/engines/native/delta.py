"""The delta rule by compiled code, in chunks, with gradients."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsoft.engines.native.availability import library
from unsoft.engines.native.binding import address, check_status
from unsoft.engines.threads import thread_count

_CHUNK, _NARROW_CHUNK = 32, 16
"""Tokens per chunk; the second where every channel has its own decay."""
_CALL = struct.Struct("25q")


def compiled_delta(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, g: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what :func:`unsoft.engines.linear.delta.delta_attention` does, for float32 or float64 on the
    CPU.

    >>> from unsoft.engines.linear.delta import token_by_token
    >>> q, k, v = (torch.nn.functional.normalize(torch.rand(1, 2, 70, 8), dim=-1) for _ in range(3))
    >>> b, g = torch.rand(1, 2, 70), -torch.rand(1, 2, 70, 1)
    >>> out, after = compiled_delta(q, k, v, b, g, None)
    >>> torch.allclose(out, token_by_token(q, k, v, b, g, None)[0], atol=1e-5)
    True
    """
    result: tuple[Tensor, Tensor] = _Delta.apply(q, k, v, b, g, state)  # type: ignore[no-untyped-call]
    return result


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, b, g, state = inputs = [None if x is None else x.contiguous() for x in tensors]
        assert q is not None and k is not None and v is not None
        (batch, heads, tokens, width), values = q.shape, v.shape[3]
        gates = 0 if g is None else g.shape[3]
        chunk = min(_NARROW_CHUNK if gates > 1 else _CHUNK, tokens)
        out, after = torch.empty_like(v), q.new_empty(batch, heads, width, values)
        states = None
        if any(ctx.needs_input_grad):
            states = q.new_empty(batch, heads, -(-tokens // chunk), width, values)
        ctx.sizes = (batch, heads, tokens, width, values, gates, chunk)
        ctx.save_for_backward(*inputs, states)
        _run("unsoft_delta_forward", q.dtype, ctx.sizes, [*inputs, out, after, states])
        return out, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_after: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, states = ctx.saved_tensors
        gradients = [None if x is None else torch.empty_like(x) for x in inputs]
        upstream = [grad_out.contiguous(), grad_after.contiguous()]
        everything = [*inputs, None, None, states, *upstream, *gradients]
        _run("unsoft_delta_backward", inputs[0].dtype, ctx.sizes, everything)
        return tuple(gradients)


def _run(name: str, dtype: torch.dtype, sizes: tuple[int, ...], tensors: list[Tensor | None]) -> None:
    """Call a function with the fields of struct Delta of kernel/delta.cpp."""
    fields = [thread_count(), *sizes, *map(address, tensors)]
    call = _CALL.pack(*fields, *(0,) * (25 - len(fields)))
    check_status(getattr(library("delta", dtype == torch.float64), name)(call))
