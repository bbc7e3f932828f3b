"""Linear attention: the weight of a key is a dot product of features,
so time and memory grow linearly with the length.

    a_ij = g(q_i) . h(k_j) / sum_l g(q_i) . h(k_l)

The feature maps g and h get q and k (..., length, D), scaled so that their dot product is the logit if asked
for, and return features (..., length, F), or their logarithms where features are exponentials: the engine
takes maxima out where they cancel.

Can: run at a cost per token that does not grow, with a state of fixed size. Cannot: focus: the sparsity of
its rows is bounded by the signal-to-noise ratio of the key features (Su 2023); only more features help.

Masks that hide whole keys (padding) stay linear. A mask that depends on the query, a float mask (which
multiplies a weight by exp(mask)) and dropout need the weights written out, at quadratic cost. A row whose
features are 0, or so small that nothing can be divided by them (below 1e-31 in float32), outputs 0.

Engines: "tiled" cuts the sequence into chunks, "dense" writes the weights out, "native" is compiled code that
goes from token to token and has no gradient; "auto" takes it for steps of decoding and chunks for the rest,
on a GPU those of "triton". Others are refused.

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> layer = Linear(LayerSpec(heads=2, head_dim=4), torch.relu)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> out, weights = layer(q, k, v, is_causal=True, return_weights=True)
>>> torch.allclose(out, weights @ v, atol=1e-6)
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unsoft.engines.arguments import checked_call
from unsoft.engines.call import Call, finite_part
from unsoft.engines.dense import visible_entries, weighted_values
from unsoft.engines.linear.attention import Sums, aligned_attention, linear_weights
from unsoft.engines.linear.choice import LINEAR, LinearResult, LinearWork, is_small_step
from unsoft.engines.linear.distances import check_distances
from unsoft.engines.linear.nonfinite import finite_call
from unsoft.engines.registry import check_return_weights
from unsoft.formula import Formula
from unsoft.modules.cache import Cache, StateCache
from unsoft.modules.linear_call import (
    hides_whole_keys,
    is_empty,
    seen_keys,
    without_zero_bias,
    zeros,
)
from unsoft.modules.linear_decoding import by_chunks, by_compiled_code, call_of_new_tokens
from unsoft.modules.module import Inputs, Mechanism
from unsoft.modules.registry import resolve_formula
from unsoft.modules.spec import LayerSpec

FeatureMap = Callable[[Tensor], Tensor]
_ASKS_FOR_POSITIONS = Formula("j")
SEGMENT = 2048
"""Tokens that are worked on at a time."""


def unchanged(x: Tensor) -> Tensor:
    """The feature map of mechanisms whose features are the query and key themselves,
    or their logarithms are."""
    return x


class Linear(Mechanism):
    """Linear attention with feature maps of your own: functions from (..., length, D) to (..., length, F).

    ``key_map`` defaults to ``query_map``. ``scaled``: the maps get q and k times sqrt(scale), so that a dot
    product of them is the logit; otherwise the raw q and k, and ``scale=`` has no effect. ``normaliser``:
    "sum" of the weights, "count" of visible keys, or "none". ``logarithmic``: the maps give the logarithms of
    positive features, for a "sum" that cannot overflow.
    """

    causal_only = False
    turns = False
    """Do the features depend on positions (:meth:`turned`), so that any positions will do?"""
    position_limit = 1
    """The M of a feature map that turns with the position (cosformer)."""

    def __init__(
        self,
        layer_spec: LayerSpec,
        query_map: FeatureMap,
        key_map: FeatureMap | None = None,
        *,
        scaled: bool = False,
        normaliser: str = "sum",
        logarithmic: bool = False,
        compiled_map: str | None = None,
    ) -> None:
        """``compiled_map``: the name of the map in compiled code (engines/native/recurrence.py),
        if it is there."""
        super().__init__(layer_spec)
        if normaliser not in ("sum", "count", "none"):
            raise ValueError(
                f"linear: argument 'normaliser' must be 'sum', 'count' or 'none', not {normaliser!r}"
            )
        if logarithmic and normaliser != "sum":
            raise ValueError(
                "linear: argument 'logarithmic' needs the normaliser 'sum', where sizes cancel, not"
                f" {normaliser!r}"
            )
        self.query_map, self.key_map = query_map, key_map or query_map
        self.scaled, self.normaliser, self.logarithmic = scaled, normaliser, logarithmic
        self.compiled_map = compiled_map

    @property
    def mass_gate(self) -> str | None:
        return "column" if self.normaliser == "sum" else None

    def decay(self) -> Tensor | None:
        """d of each head, or None."""
        return None

    def features(self, q: Tensor, k: Tensor, first_query: int, first_key: int) -> tuple[Tensor, Tensor]:
        """Features of queries and keys, which stand at positions from ``first_query`` and ``first_key``
        on."""
        return self.query_map(q), self.key_map(k)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Features of tokens at ``positions`` (B|1, length), of mechanisms that have ``turns`` set."""
        raise NotImplementedError

    def new_cache(self, batch: int) -> Cache:
        return StateCache(batch)

    def attend(self, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        call, leading = self.checked(inputs)
        options = inputs.options
        check_return_weights(inputs.return_weights, options["engine"])
        decay = self.decay()
        work = LinearWork(
            call,
            None,
            decay,
            compiled=lambda: by_compiled_code(
                self, call.q, call.k, call.v, call.scale, decay, StateCache(len(call.q))
            ),
            by_chunks=lambda sums: self._by_chunks(call, sums),
            written_out=lambda: self._written_out(call),
            weights=inputs.return_weights,
        )
        engine = LINEAR.choose(options["engine"], work)
        with torch.autocast(call.q.device.type, enabled=False):
            out, weights = _nothing(call) if is_empty(call) else engine.run(work)
        out = out.reshape(*leading, *out.shape[2:])
        if not inputs.return_weights or weights is None:
            return out
        return out, weights.reshape(*leading, *weights.shape[2:])

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Tensor | tuple[Tensor, Tensor]:
        if not isinstance(cache, StateCache):
            raise TypeError(
                f"argument 'cache' is a {type(cache).__name__}; this mechanism's new_cache() makes another"
                " kind"
            )
        q, k, v, options = inputs.query, inputs.key, inputs.value, inputs.options
        decay = self.decay()
        shape = (
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            options["scale"],
            options["enable_gqa"],
        )
        if shape == cache.checked and is_small_step(options, q, k, v, cache.state, decay):
            found = by_compiled_code(self, q, k, v, options["scale"], decay, cache)
            if found is not None:
                return found[0]
        call, leading = call_of_new_tokens(self, inputs, cache)
        cache.checked = shape
        with torch.autocast(q.device.type, enabled=False):
            work = LinearWork(
                call,
                cache.state,
                decay,
                compiled=lambda: by_compiled_code(self, call.q, call.k, call.v, call.scale, decay, cache),
                by_chunks=lambda sums: by_chunks(self, call, cache, sums),
                written_out=lambda: self._written_out(call),
                cached=True,
            )
            out, _ = LINEAR.choose(options["engine"], work).run(work)
        return out.reshape(*leading, *out.shape[2:])

    def checked(self, inputs: Inputs) -> tuple[Call, torch.Size]:
        if self.causal_only and inputs.options["is_causal"] is False:
            raise ValueError(
                f"argument 'is_causal': {type(self).__name__.lower()} looks back only; pass is_causal=True"
            )
        # The formula tells the argument check what to prepare; it computes nothing here.
        formula = resolve_formula("identity" if self.normaliser == "count" else "softmax")
        formula = _ASKS_FOR_POSITIONS if self.turns else formula
        options = {name: x for name, x in inputs.options.items() if name != "engine"}
        call, leading = checked_call(inputs.query, inputs.key, inputs.value, formula, **options)
        if self.uses_positions and not self.turns and options["positions"] is not None:
            queries, keys = options["positions"]
            check_distances(call, queries, keys, type(self).__name__.lower())
        return without_zero_bias(call), leading

    def _by_chunks(self, call: Call, sums: Sums) -> LinearResult:
        if not hides_whole_keys(call):
            return self._written_out(call)
        call, bad = finite_call(call, seen_keys(call))
        if call.causal_offset == 0 and call.q.shape[2] == call.k.shape[2]:
            out = self._in_segments(call, sums)
        else:
            fq, fk, v = self.prepared(call, call.causal_offset or 0, 0)
            options = self._summing(fq)
            out = aligned_attention(fq, fk, v, offset=call.causal_offset, sums=sums, **options)
        out = self.over_count(out, call.counts)
        if bad is not None:
            out = bad.in_rows(out, call.causal_offset)
        return out.to(call.q.dtype), None

    def _written_out(self, call: Call) -> tuple[Tensor, Tensor]:
        visible = visible_entries(call)
        finite = replace(
            call, q=finite_part(call.q), k=finite_part(call.k), v=finite_part(call.v), visible=None
        )
        fq, fk, _ = self.prepared(finite, call.causal_offset or 0, 0)
        bias = None if call.bias is None else finite_part(call.bias)
        weights = linear_weights(fq, fk, visible, offset=call.causal_offset, bias=bias, **self._summing(fq))
        return weighted_values(call, self.over_count(weights, call.counts), visible)

    def prepared(self, call: Call, first_query: int, first_key: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries and keys and the values, in the dtype of the arithmetic;
        masked keys count nothing."""
        q, k, v = (x.to(call.compute_dtype) for x in (call.q, call.k, call.v))
        if self.scaled:
            root = abs(call.scale) ** 0.5
            q, k = q * (root if call.scale >= 0 else -root), k * root
        if call.positions is None:
            fq, fk = self.features(q, k, first_query, first_key)
        else:
            queries, keys = call.positions.split([q.shape[2], k.shape[2]], dim=1)
            fq, fk = self.turned(q, queries), self.turned(k, keys)
        seen = seen_keys(call)
        if seen is not None:
            seen = seen[..., None]
            fk, v = torch.where(seen, fk, -torch.inf if self.logarithmic else 0.0), torch.where(seen, v, 0.0)
        return fq, fk, v

    def _in_segments(self, call: Call, sums: Sums) -> Tensor:
        """A causal call, one segment after the other with the state in between:
        features never exist for all tokens at once."""
        # split and not slices: the gradient of a slice is as long as the whole
        parts = list(zip(*(x.split(SEGMENT, dim=2) for x in (call.q, call.k, call.v)), strict=True))
        outs, state = [], None
        for number, (q, k, v) in enumerate(parts):
            start = number * SEGMENT
            seen = call.visible
            if seen is not None and seen.shape[3] > 1:
                seen = seen[..., start : start + SEGMENT]
            places = call.positions
            if places is not None:  # as many queries as keys
                places = places.unflatten(1, (2, -1))[..., start : start + SEGMENT].flatten(1)
            part = replace(call, q=q, k=k, v=v, visible=seen, positions=places)
            fq, fk, v = self.prepared(part, start, start)
            out, state = self.after_state(fq, fk, v, state, sums)
            outs.append(out)
        return torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]

    def after_state(
        self, fq: Tensor, fk: Tensor, v: Tensor, state: Tensor | None, sums: Sums
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of tokens that come after a state; the output and the state after them."""
        return sums(fq, fk, v, causal=True, state=state, **self._summing(fq))

    def _summing(self, like: Tensor) -> dict[str, Any]:
        decay = self.decay()
        decay = None if decay is None else decay.to(like.dtype)
        return {"normalise": self.normaliser == "sum", "decay": decay, "logarithmic": self.logarithmic}

    def over_count(self, x: Tensor, counts: Tensor | None) -> Tensor:
        return x if counts is None else x / counts[..., None]


def _nothing(call: Call) -> LinearResult:
    """Output and weights of a call without queries, keys or batch."""
    return zeros(call), call.q.new_zeros(*call.q.shape[:3], call.k.shape[2])
