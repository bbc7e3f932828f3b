"""Which engine runs a call of linear attention; a name that cannot is refused with the reason.

native  compiled code, from token to token    causal, without masks, dropout and gradient; CPU
triton  kernels on chunks                     masks of whole keys; GPUs; linear memory
tiled   torch operations on chunks            everything, any device; linear memory
dense   torch operations                      weights written out; quadratic memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import Call
from unsoft.engines.linear.attention import Sums, linear_attention
from unsoft.engines.native.direct import observed
from unsoft.engines.native.recurrence import recurrence_failure
from unsoft.engines.pointwise import no_transforms
from unsoft.engines.registry import Engine, Registry
from unsoft.engines.triton import availability as gpu
from unsoft.engines.triton.recurrence import kernels_failure, recurrence

STEP = 16
"""Up to this many tokens at a time, compiled code is faster than chunks."""

LinearResult = tuple[Tensor, Tensor | None]
"""Output, and the weights where they were written out."""


@dataclass(frozen=True)
class LinearWork:
    """Linear attention of one checked call, and the ways of computing it that its mechanism offers."""

    call: Call
    state: Tensor | None
    decay: Tensor | None
    compiled: Callable[[], LinearResult | None]
    """None if something is not finite, which compiled code has no rules for."""
    by_chunks: Callable[[Sums], LinearResult]
    """With the sums of an engine."""
    written_out: Callable[[], LinearResult]
    cached: bool = False
    """Do the tokens continue a state?"""
    weights: bool = False
    """Are the weights asked for too?"""


def _native_unsupported(work: LinearWork) -> str | None:
    call = work.call
    return _no_weights(work) or _masked(call) or _not_compiled(call.q, call.k, call.v, work.state, work.decay)


def _native_run(work: LinearWork) -> LinearResult:
    found = work.compiled()
    return _tiled_run(work) if found is None else found


def _tiled_run(work: LinearWork) -> LinearResult:
    return work.by_chunks(linear_attention)


def _triton_unsupported(work: LinearWork) -> str | None:
    call = work.call
    if reason := _no_weights(work) or gpu.missing(call.q.device.type, call.q.device.index):
        return reason
    if call.bias is not None or call.dropout_p > 0:
        return "float masks and dropout need the weights, which its kernels do not form; use 'tiled'"
    if call.visible is not None and call.visible.shape[2] > 1:
        return "its kernels know masks of whole keys, and this one depends on the query; use 'tiled'"
    if call.causal_offset is None and work.decay is not None:
        return "its kernels let weights fade in causal calls only; use 'tiled'"
    return gpu.unfit(call) or no_transforms()


def _triton_run(work: LinearWork) -> LinearResult:
    rough = work.call.q.dtype != work.call.compute_dtype
    return work.by_chunks(partial(recurrence, rough=rough))


def _triton_unavailable(work: LinearWork) -> str | None:
    device = work.call.q.device
    return gpu.unavailable(device.type, device.index) or kernels_failure(
        device.type, device.index, work.call.compute_dtype
    )


def _never_supported(work: LinearWork) -> str:
    return "it computes softmax, and this is linear attention"


def _no_weights(work: LinearWork) -> str | None:
    return "it does not form the weights; use 'dense'" if work.weights else None


def _dense_unsupported(work: LinearWork) -> str | None:
    if work.cached:
        return "a cache of fixed size does not keep the keys that weights belong to"
    return None


def _is_small_and_cached(work: LinearWork) -> bool:
    return work.cached and work.call.q.shape[2] <= STEP


def _on_gpu(work: LinearWork) -> bool:
    return work.call.q.device.type != "cpu"  # there Triton has an interpreter, for tests alone


def _native_unavailable(work: LinearWork) -> str | None:
    return recurrence_failure(work.call.q.dtype == torch.float64)


LINEAR: Registry[LinearWork, LinearResult] = Registry(
    [
        Engine(
            "native",
            _native_unsupported,
            _native_run,
            pays=_is_small_and_cached,
            unavailable=_native_unavailable,
        ),
        Engine("triton", _triton_unsupported, _triton_run, pays=_on_gpu, unavailable=_triton_unavailable),
        Engine("sdpa", _never_supported, _tiled_run),
        Engine("tiled", _no_weights, _tiled_run),
        Engine("dense", _dense_unsupported, lambda work: work.written_out()),
    ],
)
"""All engines for linear attention, the preferred ones first."""


def is_small_step(options: dict[str, Any], *tensors: Tensor | None) -> bool:
    """May a step whose shapes have been checked run compiled code?

    ``tensors``: query, key, value and what else takes part.
    """
    return (
        options["attn_mask"] is None
        and options["positions"] is None
        and options["dropout_p"] == 0
        and options["engine"] in ("auto", "native")
        and _not_compiled(*tensors) is None
    )


def _masked(call: Call) -> str | None:
    if call.visible is not None or call.bias is not None or call.dropout_p > 0:
        return "its compiled code knows no masks and no dropout; use 'tiled'"
    if call.positions is not None:
        return "its compiled code counts positions from 0; use 'tiled'"
    if call.causal_offset != 0 or call.q.shape[2] != call.k.shape[2]:
        return (
            "its compiled code goes from token to token: as many queries as keys and is_causal=True;"
            " use 'tiled'"
        )
    return None


def _not_compiled(*tensors: Tensor | None) -> str | None:
    """Why compiled code cannot run on these tensors, if so."""
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into compiled code; use 'tiled'"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return "its compiled code has no gradient; use 'tiled', or torch.no_grad()"
    if tensors[0] is not None and tensors[0].device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {tensors[0].device}; use 'tiled'"
    if observed():
        return "compiled code goes past torch's modes and torch.func transforms; use 'tiled', or 'dense'"
    return None
