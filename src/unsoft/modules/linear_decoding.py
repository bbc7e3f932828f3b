"""New tokens after a state: how linear attention decodes, by compiled code or by chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from unsoft.engines.call import Call, compute_dtype
from unsoft.engines.linear.attention import Sums
from unsoft.engines.linear.choice import LinearResult
from unsoft.engines.linear.nonfinite import finite_call
from unsoft.engines.native.recurrence import recurrence
from unsoft.modules.cache import StateCache
from unsoft.modules.linear_call import hides_whole_keys, is_empty, present, seen_keys, zeros
from unsoft.modules.module import Inputs

if TYPE_CHECKING:
    from unsoft.modules.linear import Linear


class Checking(Protocol):
    """A mechanism that has its arguments checked by itself."""

    def checked(self, inputs: Inputs) -> tuple[Call, torch.Size]: ...


def call_of_new_tokens(layer: Checking, inputs: Inputs, cache: StateCache) -> tuple[Call, torch.Size]:
    """The checked call of tokens that come after those of the cache."""
    cache.check(inputs.key)
    tokens = inputs.key.shape[-2]
    if inputs.query.shape[-2] != tokens:
        raise ValueError(
            f"argument 'key' has {tokens} tokens, 'query' has {inputs.query.shape[-2]}: with a cache of"
            " fixed size every token brings its query, key and value"
        )
    if inputs.return_weights:
        raise ValueError(
            "argument 'return_weights': a cache of fixed size does not keep the keys that weights belong to"
        )
    mask = inputs.options["attn_mask"]
    if isinstance(mask, Tensor) and mask.shape[-1] == cache.length + tokens:
        mask = mask[..., cache.length :]  # the keys before are in the state already
    options = inputs.options | {"is_causal": True, "attn_mask": mask}
    if options["positions"] is not None:
        options["positions"] = (options["positions"][0], options["positions"][1][..., cache.length :])
    call, leading = layer.checked(inputs.change(options=options))
    if not hides_whole_keys(call):
        raise ValueError(
            "arguments 'attn_mask', 'dropout_p': with a cache of fixed size only whole keys can be masked"
        )
    return call, leading


def by_compiled_code(
    layer: Linear,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    decay: Tensor | None,
    cache: StateCache,
) -> LinearResult | None:
    """Tokens after the state of the cache by compiled code, or None if it met NaN or Inf."""
    dtype = compute_dtype(q.dtype)
    narrow = None if q.dtype == dtype else q.dtype
    if narrow is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scales = (1.0, 1.0)
    if layer.scaled:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        root = math.sqrt(abs(scale))
        scales = (root if scale >= 0 else -root, root)
    if layer.compiled_map is None:
        q, k = layer.features(q * scales[0], k * scales[1], cache.length, cache.length)
        scales = (1.0, 1.0)
    found = recurrence(
        q,
        k,
        v,
        cache.state,
        normalise=layer.normaliser == "sum",
        feature_map=layer.compiled_map or "identity",
        decay=None if decay is None else decay.to(dtype),
        logarithmic=layer.logarithmic,
        scales=scales,
        first=cache.length,
        limit=layer.position_limit,
    )
    if found is None:
        return None
    out, state = found
    if layer.normaliser == "count":
        present = torch.ones(len(k), 1, k.shape[2], dtype=torch.bool)
        out = layer.over_count(out, cache.count(present).to(dtype))
    cache.advance(state, k.shape[2])
    return (out if narrow is None else out.to(narrow)), None


def by_chunks(layer: Linear, call: Call, cache: StateCache, sums: Sums) -> LinearResult:
    """New tokens after a state, by chunks."""
    tokens = call.k.shape[2]
    if is_empty(call):
        cache.length += tokens
        return zeros(call), None
    call, bad = finite_call(call, seen_keys(call))
    fq, fk, v = layer.prepared(call, cache.length, cache.length)
    out, state = layer.after_state(fq, fk, v, cache.state, sums)
    if layer.normaliser == "count":
        counts = cache.count(present(call)).clamp(min=1)
        out = layer.over_count(out, counts.to(call.compute_dtype))
    if bad is not None:
        out, state = bad.in_rows(out, 0), bad.in_state(state)
    cache.advance(state, tokens)
    return out.to(call.q.dtype), None
