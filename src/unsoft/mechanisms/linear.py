"""Linear attention: the weight of a key is a dot product of features, so time and memory grow linearly with the length.

    a_ij = g(q_i) . h(k_j) / sum_l g(q_i) . h(k_l)

| name            | g = h                     | features |                                                        |
|-----------------|---------------------------|----------|--------------------------------------------------------|
| linear-relu     | relu(x)                   | D        | rows whose features vanish output 0                    |
| linear-elu1     | elu(x) + 1                | D        | Katharopoulos et al., arXiv 2006.16236                 |
| linear-exp      | exp(x)                    | D        |                                                        |
| linear-taylor2  | (1, x, x x / sqrt 2)      | 1+D+D^2  | second-order Taylor polynomial of exp(s)               |
| linear-identity | x, divided by n instead   | D        | signed; the formula ``identity`` in linear time        |

Can: run at a cost per token that does not grow, with a state of fixed size. Cannot: focus: the sparsity of its rows is bounded by
the signal-to-noise ratio of the key features (document 001); only more features help.

Masks that hide whole keys (padding) stay linear. A mask that depends on the query, a float mask (which multiplies a weight by
exp(mask)) and dropout need the weights written out, at quadratic cost.

>>> import torch
>>> from unsoft.mechanisms.module import Place
>>> layer = Linear(Place(heads=2, head_dim=4), features.relu)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> out, weights = layer(q, k, v, is_causal=True, return_weights=True)
>>> torch.allclose(out, weights @ v, atol=1e-6)
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from unsoft.engines.arguments import checked_call
from unsoft.engines.call import Call
from unsoft.engines.dense import finite_part, visible_entries, weighted_values
from unsoft.engines.distances import check_distances
from unsoft.engines.linear import aligned_attention, linear_attention, linear_weights
from unsoft.formula.analysis import Properties
from unsoft.mechanisms import features
from unsoft.mechanisms.cache import Cache, StateCache
from unsoft.mechanisms.module import Inputs, Mechanism, Place
from unsoft.mechanisms.registry import family, resolve

FeatureMap = Callable[[Tensor], Tensor]
SEGMENT = 2048
"""Tokens that are worked on at a time."""


class Linear(Mechanism):
    """Linear attention with feature maps of your own: functions from (..., length, D) to (..., length, F).

    ``key_map`` defaults to ``query_map``. ``scaled``: the maps get q and k times sqrt(scale), so that a dot product of them is
    the logit; otherwise the raw q and k, and ``scale=`` has no effect. ``normaliser``: "sum" of the weights, "count" of visible
    keys, or "none".
    """

    causal_only = False

    def __init__(
        self, place: Place, query_map: FeatureMap, key_map: FeatureMap | None = None, *, scaled: bool = False,
        normaliser: str = "sum",
    ) -> None:  # fmt: skip
        super().__init__(place)
        if normaliser not in ("sum", "count", "none"):
            raise ValueError(
                f"linear: argument 'normaliser' must be 'sum', 'count' or 'none', not {normaliser!r}"
            )
        self.query_map, self.key_map = query_map, key_map or query_map
        self.scaled, self.normaliser = scaled, normaliser

    def decay(self) -> Tensor | None:
        """d of each head, or None."""
        return None

    def features(self, q: Tensor, k: Tensor, first_query: int, first_key: int) -> tuple[Tensor, Tensor]:
        """Features of queries and keys, which stand at positions from ``first_query`` and ``first_key`` on."""
        return self.query_map(q), self.key_map(k)

    def new_cache(self, batch: int) -> Cache:
        return StateCache(batch)

    def attend(self, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        call, leading = self._call(inputs)
        out, weights = self._run(call, inputs.return_weights or inputs.options["engine"] == "dense")
        out = out.reshape(*leading, *out.shape[2:])
        if not inputs.return_weights:
            return out
        return out, weights.reshape(*leading, *weights.shape[2:])

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Tensor | tuple[Tensor, Tensor]:
        if not isinstance(cache, StateCache):
            raise TypeError(
                f"argument 'cache' is a {type(cache).__name__}; this mechanism's new_cache() makes another kind"
            )
        cache.check(inputs.key)
        if inputs.query.shape[-2] != inputs.key.shape[-2]:
            raise ValueError(
                f"argument 'key' has {inputs.key.shape[-2]} tokens, 'query' has {inputs.query.shape[-2]}: with a cache of fixed size"
                " every token brings its query, key and value"
            )
        if inputs.return_weights:
            raise ValueError(
                "argument 'return_weights': a cache of fixed size does not keep the keys that weights belong to"
            )
        mask = inputs.options["attn_mask"]
        if isinstance(mask, Tensor) and mask.shape[-1] == cache.length + inputs.key.shape[-2]:
            mask = mask[..., cache.length :]  # the keys before are in the state already
        options = inputs.options | {"is_causal": True, "attn_mask": mask}
        if options["positions"] is not None:
            options["positions"] = (options["positions"][0], options["positions"][1][..., cache.length :])
        call, leading = self._call(inputs.change(options=options))
        if self._needs_weights(call):
            raise ValueError(
                "arguments 'attn_mask', 'dropout_p': with a cache of fixed size only whole keys can be masked"
            )
        fq, fk, v = self._prepared(call, cache.length, cache.length)
        out, state = self._continued(fq, fk, v, cache.state)
        counts = None
        if self.normaliser == "count":
            counts = cache.count(_present(call)).clamp(min=1).to(call.compute_dtype)
        cache.advance(state, inputs.key.shape[-2])
        out = self._over_count(out, counts).to(call.q.dtype)
        return out.reshape(*leading, *out.shape[2:])

    def _call(self, inputs: Inputs) -> tuple[Call, torch.Size]:
        if self.causal_only and inputs.options["is_causal"] is False:
            raise ValueError(
                f"argument 'is_causal': {type(self).__name__.lower()} looks back only; pass is_causal=True"
            )
        # The formula tells the argument check whether to count visible keys; it computes nothing here.
        formula = resolve("identity" if self.normaliser == "count" else "softmax")
        options = {name: x for name, x in inputs.options.items() if name != "engine"}
        call, leading = checked_call(inputs.query, inputs.key, inputs.value, formula, **options)
        if self.uses_positions and options["positions"] is not None:
            check_distances(call, *options["positions"], type(self).__name__.lower())
        return call, leading

    def _prepared(self, call: Call, first_query: int, first_key: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries and keys and the values, in the dtype of the arithmetic; masked keys are zero."""
        q, k, v = (x.to(call.compute_dtype) for x in (call.q, call.k, call.v))
        if self.scaled:
            root = abs(call.scale) ** 0.5
            q, k = q * (root if call.scale >= 0 else -root), k * root
        fq, fk = self.features(q, k, first_query, first_key)
        if call.visible is not None and call.visible.shape[2] == 1:
            seen = call.visible[:, :, 0, :, None]
            fk, v = torch.where(seen, fk, 0.0), torch.where(seen, v, 0.0)
        return fq, fk, v

    def _needs_weights(self, call: Call) -> bool:
        """Must the weights be written out? Yes where a mask depends on the query, and for exact rules about NaN."""
        if call.bias is not None or call.dropout_p > 0:
            return True
        if call.visible is not None:
            by_key = call.visible.shape[2] == 1 and call.visible.shape[1] in (1, call.k.shape[1])
            if not by_key:
                return True
        if torch.compiler.is_compiling():  # cannot ask for values while tracing
            return False
        return not all(bool(x.isfinite().all()) for x in (call.q, call.k, call.v))

    def _run(self, call: Call, written_out: bool) -> tuple[Tensor, Tensor | None]:
        normalise = self.normaliser == "sum"
        if not written_out and not self._needs_weights(call):
            if call.causal_offset == 0 and call.q.shape[2] == call.k.shape[2]:
                out = self._in_segments(call)
            else:
                fq, fk, v = self._prepared(call, call.causal_offset or 0, 0)
                out = aligned_attention(
                    fq, fk, v, offset=call.causal_offset, normalise=normalise, decay=self.decay_like(fq)
                )
            return self._over_count(out, call.counts).to(call.q.dtype), None
        q, k = finite_part(call.q), finite_part(call.k)
        fq, fk, _ = self._prepared(replace(call, q=q, k=k), call.causal_offset or 0, 0)
        visible = visible_entries(call)
        factor = (
            visible.to(fq.dtype)
            if call.bias is None
            else torch.where(visible, finite_part(call.bias).exp(), 0.0)
        )
        decay = self.decay_like(fq)
        weights = linear_weights(
            fq, fk, offset=call.causal_offset, normalise=normalise, decay=decay, factor=factor
        )
        return weighted_values(call, self._over_count(weights, call.counts), visible)

    def _in_segments(self, call: Call) -> Tensor:
        """A causal call, one segment after the other with the state in between: features never exist for all tokens at once."""
        # split and not slices: the gradient of a slice is as long as the whole
        parts = list(zip(*(x.split(SEGMENT, dim=2) for x in (call.q, call.k, call.v)), strict=True))
        outs, state = [], None
        for number, (q, k, v) in enumerate(parts):
            start = number * SEGMENT
            seen = call.visible
            if seen is not None and seen.shape[3] > 1:
                seen = seen[..., start : start + SEGMENT]
            fq, fk, v = self._prepared(replace(call, q=q, k=k, v=v, visible=seen), start, start)
            out, state = self._continued(fq, fk, v, state)
            outs.append(out)
        return torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]

    def _continued(self, fq: Tensor, fk: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Causal attention of tokens that come after a state; the output and the state after them."""
        normalise, decay = self.normaliser == "sum", self.decay_like(fq)
        return linear_attention(fq, fk, v, causal=True, normalise=normalise, decay=decay, state=state)

    def _over_count(self, x: Tensor, counts: Tensor | None) -> Tensor:
        return x if counts is None else x / counts[..., None]

    def decay_like(self, x: Tensor) -> Tensor | None:
        decay = self.decay()
        return None if decay is None else decay.to(x.dtype)


def _present(call: Call) -> Tensor:
    """Bool (B, H|1, S): the keys that are not masked, where masks hide whole keys."""
    batch, keys = call.k.shape[0], call.k.shape[2]
    if call.visible is None:
        return torch.ones(batch, 1, keys, dtype=torch.bool, device=call.k.device)
    return call.visible[:, :, 0].expand(batch, -1, keys)


_SHARES = Properties(signed=False, row_sum="1", l1="1", sparse=False, needs_length=False, continuous=True)


def _family(query_map: FeatureMap, **options: object) -> Callable[[Place], Linear]:
    return lambda place: Linear(place, query_map, **options)


family(
    "linear-relu",
    _family(features.relu),
    summary="linear attention with rectified features",
    properties=_SHARES,
)
family(
    "linear-elu1",
    _family(features.elu1),
    summary="linear attention with elu(x) + 1 features",
    properties=_SHARES,
)
family(
    "linear-exp",
    _family(features.exponential, scaled=True),
    summary="linear attention with exponential features",
    properties=_SHARES,
)
family(
    "linear-taylor2",
    _family(features.taylor2, scaled=True),
    summary="linear attention with the Taylor features of exp",
    properties=_SHARES,
)
family(
    "linear-identity",
    _family(features.identity, scaled=True, normaliser="count"),
    summary="the formula identity in linear time",
    properties=Properties(True, "free", "free", False, True, True),
)
