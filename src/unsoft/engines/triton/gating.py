"""Magnitude's gate on values (``where="values"``) on a GPU: the product, and both gradients in one pass, as
an operator. Torch operations would read the values several times, to keep those that are not finite from the
gradient of the gates, and wait for the GPU to learn whether there are any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsoft.engines.operator import define, refuse
from unsoft.engines.triton.binding import on_device
from unsoft.engines.triton.call_arguments import padded, view
from unsoft.engines.triton.kernel.structures import ChunkShape, GatingFixed
from unsoft.engines.triton.launch import INTERPRETED_SIZES, Launch, interpreted, start
from unsoft.engines.triton.tile_sizes import TileSizes

SIZES = TileSizes(64, 64, 4, 1)
"""Keys, columns of values at a time, warps and stages."""


def gated(value: Tensor, gate: Tensor) -> Tensor:
    """Values (..., keys, width) times gates (..., keys), in the dtype of the values.

    A value that is not finite gives the gate no gradient.
    """
    shape = torch.broadcast_shapes(value.shape[:-1], gate.shape)
    values, gates = value.expand(*shape, value.shape[-1]), gate.expand(shape)
    if len(shape) != 3:
        values, gates = values.reshape(-1, 1, *values.shape[-2:]), gates.reshape(-1, 1, shape[-1])
    out: Tensor = torch.ops.unsoft.triton_gated.default(values, gates)
    return out.reshape(*shape, value.shape[-1])


def forward(value: Tensor, gate: Tensor) -> Tensor:
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    _run(value, gate, None, out, None)
    return out


def backward(grad: Tensor, value: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of values and gates."""
    d_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _run(value, gate, grad.resolve_neg(), d_value, d_gate)
    return d_value, d_gate


def _run(value: Tensor, gate: Tensor, grad: Tensor | None, out: Tensor, d_gate: Tensor | None) -> None:
    from unsoft.engines.triton.kernel.gating import gating_kernel

    batch, heads, keys, width = value.shape
    if value.numel() == 0:
        return
    sizes = INTERPRETED_SIZES if interpreted() else SIZES
    sizes = sizes._replace(keys=min(sizes.keys, padded(width)))
    arguments = {
        "values": view(value.resolve_neg()),
        "gates": view(gate.resolve_neg()),
        "grad": view(grad),
        "out": view(out),
        "d_gates": d_gate,
        "shape": ChunkShape(heads, heads, keys),
        "FIXED": GatingFixed(width, gate.dtype == torch.float64),
    }
    grid = -(-keys // sizes.rows), batch * heads
    with on_device(value):
        start(Launch("gating", gating_kernel, arguments, lambda _: grid, "", value.dtype, (sizes,)))


def _forward_shapes(value: Tensor, gate: Tensor) -> Tensor:
    return value.new_empty(value.shape)


def _backward_shapes(grad: Tensor, value: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), gate.new_empty(gate.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.unsoft.triton_gated_backward.default(grad, *ctx.saved_tensors)
    return found


define("triton_gated", "(Tensor value, Tensor gate) -> Tensor", forward, _forward_shapes)
define(
    "triton_gated_backward",
    "(Tensor grad, Tensor value, Tensor gate) -> (Tensor, Tensor)",
    backward,
    _backward_shapes,
)
torch.library.register_autograd("unsoft::triton_gated", _differentiate, setup_context=_setup)
torch.library.register_autograd("unsoft::triton_gated_backward", refuse)
