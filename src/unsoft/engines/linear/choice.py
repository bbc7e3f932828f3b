"""The engines of linear attention, and how one is chosen.

native  compiled code, from token to token    causal, without masks, dropout and gradient; CPU
triton  kernels on chunks                     masks of whole keys; GPUs; linear memory
tiled   torch operations on chunks            everything, any device; linear memory
dense   torch operations                      weights written out; quadratic memory
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.call import finite_part
from unsoft.engines.dense import visible_entries, weighted_values
from unsoft.engines.linear.attention import Sums, aligned_attention, linear_attention, linear_weights
from unsoft.engines.linear.call import LinearCall, LinearResult, finite_call, hides_whole_keys, seen_keys
from unsoft.engines.native.availability import library_failure
from unsoft.engines.native.direct import observed
from unsoft.engines.native.step import recurrence as compiled_recurrence
from unsoft.engines.pointwise import no_transforms, on_gpu
from unsoft.engines.registry import Engine, Registry
from unsoft.engines.triton import availability as gpu
from unsoft.engines.triton.recurrence import kernels_failure, recurrence

STEP = 16
"""Up to this many tokens at a time, compiled code is faster than chunks."""
SEGMENT = 2048
"""Tokens whose features exist at the same time."""


def run_compiled(work: LinearCall) -> LinearResult | None:
    """Return the result of compiled code, or None if something is not finite, for which it has no rules."""
    call, rule = work.call, work.rule
    if rule.compiled_map is None:
        q, k, v = work.features(call, work.first, work.first)
        scales = (1.0, 1.0)
    else:
        q, k, v = (x.to(call.compute_dtype) for x in (call.q, call.k, call.v))
        scales = rule.scales(call.scale)
    of_map: dict[str, Any] = {
        "feature_map": rule.compiled_map or "identity",
        "scales": scales,
        "limit": rule.position_limit,
    }
    options = work.sum_options(q.dtype) | of_map
    result = compiled_recurrence(q, k, v, work.state, first=work.first, **options)
    if result is None:
        return None
    out = _over_counts(result[0], call.counts).to(call.out_dtype)
    return LinearResult(out, state=result[1])


def run_chunks(work: LinearCall, sums: Sums = linear_attention) -> LinearResult:
    """Return the result of sums over chunks; ``sums``: :func:`linear_attention`, or that of an engine."""
    if not hides_whole_keys(work.call):
        return run_dense(work)
    call, bad = finite_call(work.call, seen_keys(work.call))
    offset, state = call.causal_offset, None
    if offset == 0 and call.q.shape[2] == call.k.shape[2]:
        work = replace(work, call=call)
        out, state = _in_segments(work, sums)
    else:
        fq, fk, v = work.features(call, offset or 0, 0)
        out = aligned_attention(fq, fk, v, offset=offset, sums=sums, **work.sum_options(fq.dtype))
    out = _over_counts(out, call.counts)
    if bad is not None:
        out = bad.in_rows(out, offset)
        state = None if state is None else bad.in_state(state)
    return LinearResult(out.to(call.out_dtype), state=state)


def run_dense(work: LinearCall) -> LinearResult:
    """Return the result of weights that are written out."""
    call, offset = work.call, work.call.causal_offset
    visible = visible_entries(call)
    q, k, v = (finite_part(x) for x in (call.q, call.k, call.v))
    fq, fk, _ = work.features(replace(call, q=q, k=k, v=v, visible=None), offset or 0, 0)
    bias = None if call.bias is None else finite_part(call.bias)
    weights = linear_weights(fq, fk, visible, offset=offset, bias=bias, **work.sum_options(fq.dtype))
    return LinearResult(*weighted_values(call, _over_counts(weights, call.counts), visible))


def _in_segments(work: LinearCall, sums: Sums) -> tuple[Tensor, Tensor]:
    """Return the output of a causal call and the state after it, computed one segment after the other:
    features never exist for all tokens at once."""
    call, outs, state = work.call, [], work.state
    # split and not slices: the gradient of a slice is as long as the whole
    parts = list(zip(*(x.split(SEGMENT, dim=2) for x in (call.q, call.k, call.v)), strict=True))
    for number, (q, k, v) in enumerate(parts):
        start = number * SEGMENT
        seen, positions = call.visible, call.positions
        if seen is not None and seen.shape[3] > 1:
            seen = seen[..., start : start + SEGMENT]
        if positions is not None:  # as many queries as keys
            positions = positions.unflatten(1, (2, -1))[..., start : start + SEGMENT].flatten(1)
        part = replace(call, q=q, k=k, v=v, visible=seen, positions=positions)
        fq, fk, v = work.features(part, work.first + start, work.first + start)
        out, state = sums(fq, fk, v, causal=True, state=state, **work.sum_options(fq.dtype))
        outs.append(out)
    assert state is not None  # there is at least one segment
    return torch.cat(outs, dim=2) if len(outs) > 1 else outs[0], state


def _over_counts(x: Tensor, counts: Tensor | None) -> Tensor:
    return x if counts is None else x / counts[..., None]


def _run_triton(work: LinearCall) -> LinearResult:
    rough = work.call.q.dtype != work.call.compute_dtype
    return run_chunks(work, partial(recurrence, rough=rough))


def _native_unsupported(work: LinearCall) -> str | None:
    call = work.call
    if reason := _forms_no_weights(work):
        return reason
    if call.visible is not None or call.bias is not None or call.dropout_p > 0:
        return "its compiled code supports no masks and no dropout; use 'tiled'"
    if call.positions is not None:
        return "its compiled code counts positions from 0; use 'tiled'"
    if call.causal_offset != 0 or call.q.shape[2] != call.k.shape[2]:
        return (
            "its compiled code goes from token to token: as many queries as keys and is_causal=True;"
            " use 'tiled'"
        )
    return _not_compiled(call.q, call.k, call.v, work.state, work.rule.decay)


def _triton_unsupported(work: LinearCall) -> str | None:
    call = work.call
    if reason := _forms_no_weights(work) or gpu.missing(call.q.device.type, call.q.device.index):
        return reason
    if call.bias is not None or call.dropout_p > 0:
        return "float masks and dropout need the weights, which its kernels do not form; use 'tiled'"
    if call.visible is not None and call.visible.shape[2] > 1:
        return "its kernels support masks of whole keys, and this one depends on the query; use 'tiled'"
    if call.causal_offset is None and work.rule.decay is not None:
        return "its kernels support decay in causal calls only; use 'tiled'"
    return gpu.unfit(call) or no_transforms()


def _triton_unavailable(work: LinearCall) -> str | None:
    device = work.call.q.device.type, work.call.q.device.index
    return gpu.unavailable(*device) or kernels_failure(*device, work.call.compute_dtype)


def _forms_no_weights(work: LinearCall) -> str | None:
    return "it does not form the weights; use 'dense'" if work.weights else None


def _dense_unsupported(work: LinearCall) -> str | None:
    if work.cached:
        return "a cache of fixed size does not keep the keys that weights belong to"
    return None


LINEAR: Registry[LinearCall, LinearResult] = Registry(
    [
        Engine(
            "native",
            _native_unsupported,
            lambda work: run_compiled(work) or run_chunks(work),
            prefer=lambda work: work.cached and work.call.q.shape[2] <= STEP,
            unavailable_reason=lambda work: library_failure("recurrence", work.call.q.dtype == torch.float64),
        ),
        Engine(
            "triton",
            _triton_unsupported,
            _run_triton,
            prefer=lambda work: on_gpu(work.call.q),
            unavailable_reason=_triton_unavailable,
        ),
        Engine("tiled", _forms_no_weights, run_chunks),
        Engine("dense", _dense_unsupported, run_dense),
    ],
    missing={"sdpa": "it computes softmax, and this is linear attention"},
)
"""All engines for linear attention, the preferred ones first."""


def is_compiled_step(options: dict[str, Any], query: Tensor, *tensors: Tensor | None) -> bool:
    """Return True if a step whose shapes have been checked can run compiled code.

    ``tensors``: key, value and what else takes part.
    """
    return (
        options["attn_mask"] is None
        and options["positions"] is None
        and options["dropout_p"] == 0
        and options["engine"] in ("auto", "native")
        and _not_compiled(query, *tensors) is None
        and library_failure("recurrence", query.dtype == torch.float64) is None
    )


def _not_compiled(query: Tensor, *tensors: Tensor | None) -> str | None:
    """Return why compiled code cannot run on these tensors; None if it can."""
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into compiled code; use 'tiled'"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, *tensors)):
        return "its compiled code has no gradient; use 'tiled', or torch.no_grad()"
    if query.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {query.device}; use 'tiled'"
    if observed():
        return "compiled code goes past torch's modes and torch.func transforms; use 'tiled', or 'dense'"
    return None
