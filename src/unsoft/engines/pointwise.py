"""The engines that run a formula, and :func:`run_formula`: checks, autocast, choice of the engine.

``sdpa`` is PyTorch's own fused kernel, for softmax where nothing can make its result differ from the
specification. It has no exact rules for NaN and Inf (a masked NaN poisons rows that cannot see it, a NaN
query gives zeros), so it is used for finite inputs only, and without masks.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unsoft.engines import tiled
from unsoft.engines.arguments import as_autocast, checked_call, device_type, with_leading
from unsoft.engines.call import Call
from unsoft.engines.dense import dense_attention
from unsoft.engines.native import binding
from unsoft.engines.native.availability import formula_failure
from unsoft.engines.native.direct import run_directly
from unsoft.engines.operator import fused_operator
from unsoft.engines.registry import Engine, Registry, check_return_weights, no_reason
from unsoft.engines.threads import threads_are_used
from unsoft.engines.triton import availability as gpu
from unsoft.engines.triton import binding as triton_binding
from unsoft.formula import Formula

SMALL = 1 << 14
"""Up to this many weights one dense evaluation takes fewer torch calls than a loop over tiles."""
_COMPILED = ("auto", "native")
_SOFTMAX = Formula(weight="exp(s - m)", mass="exp(s - m)", peak="s")


def no_transforms(call: object = None) -> str | None:
    """Return why a fused operator cannot run here; None if it can. Its derivative is an operator too, not a
    torch program."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return (
            "fused operators have no rules for torch.func transforms such as vmap and jvp; use engine='dense'"
        )
    if torch.compiler.is_exporting():
        return "an exported program must run where unsoft is not installed; use engine='dense'"
    if torch.autograd.forward_ad._current_level >= 0:
        return "fused operators have no forward-mode derivative; use engine='dense'"
    return None


def native_unsupported(q: Tensor) -> str | None:
    """Return why compiled code cannot run on tensors like ``q``; None if it can."""
    if q.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {q.device}; use 'tiled' there"
    return no_transforms()


def on_gpu(x: Tensor) -> bool:
    """Return False on the CPU, where Triton only has an interpreter, for tests."""
    return x.device.type != "cpu"


def _sdpa_unsupported(call: Call) -> str | None:
    if reason := no_transforms():
        return reason
    if call.formula != _SOFTMAX:
        return "it computes softmax only"
    if any(x is not None for x in (call.visible, call.bias, call.spans)) or call.causal_offset not in (
        None,
        0,
    ):
        return "it is used without masks, and with the causal alignment 'upper_left' only"
    if call.dropout_p > 0:
        return "it does not draw dropout from the counter that all other engines share"
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        return "it is used for non-empty inputs only"
    if torch.compiler.is_compiling():
        return "its inputs must be finite, which cannot be checked while a graph is traced"
    if not all(bool(x.isfinite().all()) for x in (call.q, call.k, call.v)):
        return "its rules for NaN and Inf differ"
    return None


def _sdpa(call: Call) -> Tensor:
    causal, grouped = call.causal_offset is not None, call.q.shape[1] != call.k.shape[1]
    return scaled_dot_product_attention(
        call.q, call.k, call.v, is_causal=causal, scale=call.scale, enable_gqa=grouped
    )


def _narrow(run: Callable[[Call], Tensor]) -> Callable[[Call], Tensor]:
    """Return an engine whose output has the dtype of the inputs, whatever the call asks for."""
    return lambda call: run(replace(call, wide=False))


POINTWISE: Registry[Call, Tensor] = Registry(
    [
        Engine(
            "triton",
            lambda call: gpu.unsupported(call) or no_transforms(),
            _narrow(fused_operator("triton", triton_binding.forward, triton_binding.backward)),
            prefer=lambda call: on_gpu(call.q),
            unavailable_reason=lambda call: gpu.unavailable(call.q.device.type, call.q.device.index),
        ),
        Engine(
            "native",
            lambda call: native_unsupported(call.q),
            fused_operator("native", binding.forward, binding.backward),
            unavailable_reason=lambda call: formula_failure(call.formula.key, call.q.dtype == torch.float64),
        ),
        Engine("sdpa", _sdpa_unsupported, _sdpa),
        Engine(
            "tiled",
            no_transforms,
            fused_operator("tiled", tiled.forward, tiled.backward),
            prefer=lambda call: call.q.shape[:3].numel() * call.k.shape[2] > SMALL,
        ),
        Engine("dense", no_reason, lambda call: dense_attention(call)[0]),
    ]
)
"""All engines for formulas, the preferred ones first."""


def run_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    engine: str = "auto",
    return_weights: bool = False,
    statistics: Callable[[Call, str, Callable[[Call], Tensor]], tuple[Tensor, Any]] | None = None,
    params: Mapping[str, float | Tensor] | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
    fields: Mapping[str, Any] | None = None,
    wide: bool = False,
    **structure: Any,
) -> Tensor | tuple[Tensor, Any]:
    """Run a formula on tensors as a user passes them; see :func:`unsoft.attention`. ``structure``: window,
    documents, cu_seqlens, key_lengths. ``wide``: half-precision inputs may give an output in float32, see
    :class:`Call`. ``statistics``: returns the output and a named tuple of tensors (B, H,
    ...), from the call, and the name and the function of the engine."""
    plain = (
        not structure
        and attn_mask is None
        and params is None
        and positions is None
        and return_weights is False
        and statistics is None
    )
    plain = plain and engine in _COMPILED and type(dropout_p) is float and dropout_p == 0.0
    # The tracer of torch.compile must not look into the fast path.
    if plain and not torch.compiler.is_compiling():
        out = run_directly(query, key, value, formula, is_causal, scale, enable_gqa, fields, wide)
        if out is not None:
            return out
    POINTWISE.check(engine)
    check_return_weights(return_weights, engine)
    _check_return_stats(statistics is not None, return_weights, engine)
    threads_are_used()
    kind = device_type(query)
    autocast = torch.is_autocast_enabled(kind)
    # Narrowed before autocast is switched off: the arithmetic inside keeps its precision.
    query, key, value = as_autocast(query, key, value)
    with torch.autocast(kind, enabled=False) if autocast else nullcontext():
        call, leading = checked_call(
            query,
            key,
            value,
            formula,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            params=params,
            positions=positions,
            fields=fields,
            **structure,
        )
        call = replace(call, strict=engine != "auto", wide=wide)
        if return_weights:
            out, weights = dense_attention(call)
            return with_leading(out, leading), with_leading(weights, leading)
        chosen = POINTWISE.choose(engine, call)
        if statistics is None:
            return with_leading(chosen.run(call), leading)
        out, stats = statistics(call, chosen.name, chosen.run)
        return with_leading(out, leading), type(stats)(*(with_leading(x, leading) for x in stats))


def _check_return_stats(return_stats: bool, return_weights: bool, engine: str) -> None:
    """Raise ValueError if statistics are requested beside the weights, or from an engine without them."""
    if return_stats and return_weights:
        raise ValueError(
            "attention: argument 'return_stats' cannot be combined with 'return_weights'; unsoft.measure"
            " computes the same statistics from the weights"
        )
    if return_stats and engine == "sdpa":
        raise ValueError(
            "attention: argument 'return_stats': engine 'sdpa' has no statistics; use 'auto', 'native',"
            " 'triton', 'tiled' or 'dense'"
        )
