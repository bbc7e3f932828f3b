"""Weights inside the chunks of linear attention whose features come as logarithms (kernel/pairs.py), as one
operator with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsoft.engines.operator import define, refuse
from unsoft.engines.triton.binding import on_device
from unsoft.engines.triton.call_arguments import view
from unsoft.engines.triton.kernel.structures import ChunkShape, PairFixed
from unsoft.engines.triton.launch import INTERPRETED_SIZES, Launch, interpreted, start
from unsoft.engines.triton.tile_sizes import TileSizes

SIZES = TileSizes(32, 4, 4, 1)
"""Tokens of a chunk, features at a time, warps and stages. Every term inside a chunk costs an exponential,
every chunk a state in memory: at 32 tokens they take about as long as each other."""


def chunk_tokens() -> int:
    """Tokens of a chunk where features come as logarithms."""
    return INTERPRETED_SIZES.rows if interpreted() else SIZES.rows


def pair_weights(q: Tensor, k: Tensor, tops: Tensor) -> Tensor:
    """sum_f exp(q_if + k_jf - top_i) for keys j <= i of the chunk of row i: (B, H, tokens, chunk).

    ``tops``: (B, H, tokens, 1), at least as large as all exponents of the row; not differentiated.
    """
    weights: Tensor = torch.ops.unsoft.triton_pairs.default(q, k, tops, size=chunk_tokens())
    return weights


def forward(q: Tensor, k: Tensor, tops: Tensor, *, size: int) -> Tensor:
    weights = q.new_empty(*q.shape[:3], size)
    _run("pairs", weights, q, k, tops, size=size, of_keys=False, weights=view(weights))
    return weights


def backward(grad: Tensor, q: Tensor, k: Tensor, tops: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """Gradients of q and k."""
    found = torch.empty_like(q), torch.empty_like(k)
    for of_keys, out in enumerate(found):
        more = {"grad": view(grad.resolve_neg()), "out": view(out)}
        _run("pair_gradients", out, q, k, tops, size=size, of_keys=bool(of_keys), **more)
    return found


def _run(
    name: str, made: Tensor, q: Tensor, k: Tensor, tops: Tensor, *, size: int, of_keys: bool, **more: Any
) -> None:
    """``made``: what is computed; its heads are those of the grid."""
    from unsoft.engines.triton.kernel import pairs

    batch, heads, tokens, _ = made.shape
    arguments = {
        "q": view(q.resolve_neg()),
        "k": view(k.resolve_neg()),
        "tops": view(tops),
        **more,
        "shape": ChunkShape(heads, k.shape[1], tokens),
        "FIXED": PairFixed(q.shape[3], q.shape[1] // k.shape[1], of_keys, q.dtype == torch.float64),
    }
    kernel = pairs.pair_kernel if name == "pairs" else pairs.pair_gradient_kernel
    grid = -(-tokens // size), batch * heads
    with on_device(q):
        start(Launch(name, kernel, arguments, lambda _: grid, "", q.dtype, (SIZES._replace(rows=size),)))


def _backward_shapes(grad: Tensor, q: Tensor, k: Tensor, tops: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _forward_shapes(q: Tensor, k: Tensor, tops: Tensor, *, size: int) -> Tensor:
    return q.new_empty(*q.shape[:3], size)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.size = keyword_only_inputs["size"]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    run = torch.ops.unsoft.triton_pairs_backward.default
    return (*run(grad, *ctx.saved_tensors, size=ctx.size), None)


_INPUTS = "Tensor q, Tensor k, Tensor tops, *, int size"
define("triton_pairs", f"({_INPUTS}) -> Tensor", forward, _forward_shapes)
define("triton_pairs_backward", f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor)", backward, _backward_shapes)
torch.library.register_autograd("unsoft::triton_pairs", _differentiate, setup_context=_setup)
torch.library.register_autograd("unsoft::triton_pairs_backward", refuse)
