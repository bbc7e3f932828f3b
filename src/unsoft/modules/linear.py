"""Linear attention: the weight of a key is a dot product of features, so time and memory grow linearly with
the length.

    a_ij = g(q_i) . h(k_j) / sum_l g(q_i) . h(k_l)

The feature maps g and h get q and k (..., length, D), optionally scaled so that their dot product is the
logit. They return features (..., length, F), or their logarithms where features are exponentials: the engine
then subtracts maxima, which cancel.

Strengths: constant cost per token, with a state of fixed size. Limitations: the sparsity of its rows is
bounded by the signal-to-noise ratio of the key features (Su 2023); only more features help.

Masks that hide whole keys (padding) stay linear. A mask that depends on the query, a float mask (which
multiplies a weight by exp(mask)) and dropout need the weights written out, at quadratic cost. A row whose
features are 0, or so small that nothing can be divided by them (below 1e-31 in float32), outputs 0.

Engines: "tiled" cuts the sequence into chunks, "dense" writes the weights out, "native" is compiled code that
goes from token to token and has no gradient. "auto" uses it for decoding steps and chunks for the rest, on a
GPU those of "triton". Other engines are unsupported.

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> layer = Linear(LayerSpec(heads=2, head_dim=4), torch.relu)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> out, weights = layer(q, k, v, is_causal=True, return_weights=True)
>>> torch.allclose(out, weights @ v, atol=1e-6)
True
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from unsoft.checks import one_of
from unsoft.engines.arguments import with_leading
from unsoft.engines.call import Call
from unsoft.engines.linear.call import (
    LinearCall,
    LinearResult,
    LinearRule,
    check_distances,
    hides_whole_keys,
    is_empty,
    present,
    without_zero_bias,
    zero_weights,
    zeros,
)
from unsoft.engines.linear.choice import LINEAR, is_compiled_step, run_compiled
from unsoft.engines.registry import check_return_weights
from unsoft.modules.cache import Cache, StateCache, of_kind
from unsoft.modules.module import Inputs, Mechanism, Result
from unsoft.modules.spec import LayerSpec

FeatureMap = Callable[..., Tensor]


def unchanged(x: Tensor) -> Tensor:
    """Return ``x``: the feature map of mechanisms whose features, or their logarithms, are the query and key
    themselves."""
    return x


class Recurrent(Mechanism):
    """Base of mechanisms that decode with a state of fixed size in place of all keys and values."""

    @abstractmethod
    def checked(self, inputs: Inputs) -> tuple[Call, torch.Size]:
        """Return the checked call, and the leading dimensions of its results."""

    def new_cache(self, batch: int) -> Cache:
        return StateCache(batch)

    def call_of_new_tokens(self, inputs: Inputs, cache: StateCache) -> tuple[Call, torch.Size]:
        """Return the checked call of tokens that come after those of the cache."""
        cache.check(inputs.key)
        tokens = inputs.key.shape[-2]
        if inputs.query.shape[-2] != tokens:
            raise ValueError(
                f"argument 'key' has {tokens} tokens, 'query' has {inputs.query.shape[-2]}: with a cache of"
                " fixed size every token needs a query, a key and a value"
            )
        if inputs.return_weights:
            raise ValueError(
                "argument 'return_weights': a cache of fixed size does not keep the keys of the weights"
            )
        mask = inputs.options["attn_mask"]
        if isinstance(mask, Tensor) and mask.shape[-1] == cache.length + tokens:
            mask = mask[..., cache.length :]  # the keys before are in the state already
        positions = inputs.options["positions"]
        if positions is not None:
            positions = (positions[0], positions[1][..., cache.length :])
        call, leading = self.checked(inputs.with_options(is_causal=True, attn_mask=mask, positions=positions))
        if not hides_whole_keys(call):
            raise ValueError(
                "arguments 'attn_mask', 'dropout_p': with a cache of fixed size only whole keys can be masked"
            )
        return call, leading


class Linear(Recurrent):
    """Linear attention with feature maps of your own: functions from (..., length, D) to (..., length, F).

    ``key_map`` defaults to ``query_map``. ``scaled``: the maps get q and k times sqrt(scale), so that a dot
    product of them is the logit; otherwise the raw q and k, and ``scale=`` has no effect. ``normaliser``:
    "sum" of the weights, "count" of visible keys, or "none". ``logarithmic``: the maps return the logarithms
    of positive features, for a "sum" that cannot overflow. ``positional``: the maps take the positions
    (B|1, length) of the tokens as a second argument. ``compiled_map``: the name of the map in compiled code
    (engines/native/step.py), if it is there; ``position_limit`` is the M of its map "cosine".
    """

    def __init__(
        self,
        layer_spec: LayerSpec,
        query_map: FeatureMap,
        key_map: FeatureMap | None = None,
        *,
        scaled: bool = False,
        normaliser: str = "sum",
        logarithmic: bool = False,
        positional: bool = False,
        compiled_map: str | None = None,
        position_limit: int = 1,
    ) -> None:
        super().__init__(layer_spec)
        one_of("linear", "normaliser", normaliser, ("sum", "count", "none"))
        if logarithmic and normaliser != "sum":
            raise ValueError(
                "linear: argument 'logarithmic' needs the normaliser 'sum', where sizes cancel, not"
                f" {normaliser!r}"
            )
        self.query_map, self.key_map = query_map, key_map or query_map
        self.scaled, self.normaliser, self.logarithmic = scaled, normaliser, logarithmic
        self.positional, self.position_limit, self.compiled_map = positional, position_limit, compiled_map

    @property
    def mass_gate(self) -> str | None:
        return "column" if self.normaliser == "sum" else None

    def decay(self) -> Tensor | None:
        """Return d of each head, or None."""
        return None

    def attend(self, inputs: Inputs) -> Result:
        call, leading = self.checked(inputs)
        engine = inputs.options["engine"]
        check_return_weights(inputs.return_weights, engine)
        work = LinearCall(call, weights=inputs.return_weights)
        chosen = LINEAR.choose(engine, work)
        with torch.autocast(call.q.device.type, enabled=False):
            result = LinearResult(zeros(call), zero_weights(call)) if is_empty(call) else chosen.run(work)
        out = with_leading(result.out, leading)
        if not inputs.return_weights or result.weights is None:
            return out
        return out, with_leading(result.weights, leading)

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        cache = of_kind(StateCache, cache)
        q, k, v, options = inputs.query, inputs.key, inputs.value, inputs.options
        shapes = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
        layout = (*shapes, options["scale"], options["enable_gqa"])
        if layout == cache.checked:
            out = self._compiled_step(inputs, cache)
            if out is not None:
                return out
        call, leading = self.call_of_new_tokens(inputs, cache)
        cache.checked = layout
        with torch.autocast(q.device.type, enabled=False):
            work = LinearCall(call, cache.state, cache.length, cached=True)
            chosen = LINEAR.choose(options["engine"], work)
            if is_empty(call):
                cache.length += call.k.shape[2]
                return with_leading(zeros(call), leading)
            work = replace(work, call=self._counted(call, cache))
            real = None if options["positions"] is None else _real_tokens(work)
            result = chosen.run(work) if real is None else _by_sequence(chosen.run, work, real)
        assert result.state is not None  # every engine returns it for cached calls
        cache.advance(result.state, call.k.shape[2])
        return with_leading(result.out, leading)

    def _compiled_step(self, inputs: Inputs, cache: StateCache) -> Tensor | None:
        """Return the output for tokens like those of the last step, whose checks need not be repeated; None
        if compiled code cannot run."""
        q, k, v = inputs.query, inputs.key, inputs.value
        rule, seen = self.rule(), cache.seen
        if not is_compiled_step(inputs.options, q, k, v, cache.state, rule.decay):
            return None
        scale = inputs.options["scale"]
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        call = self._counted(Call(q, k, v, rule, q, causal_offset=0, scale=scale), cache)
        result = run_compiled(LinearCall(call, cache.state, cache.length, cached=True))
        if result is None or result.state is None:
            cache.seen = seen  # the general path counts the keys again
            return None
        cache.advance(result.state, k.shape[2])
        return result.out

    def _counted(self, call: Call, cache: StateCache) -> Call:
        """Return the call with counts of all keys, those of the cache among them, if they are divided by."""
        if self.normaliser != "count":
            return call
        return replace(call, counts=cache.count(present(call)).clamp(min=1).to(call.compute_dtype))

    def rule(self) -> LinearRule:
        """Return the rule that engines run, with the current decay."""
        return LinearRule(
            uses=frozenset(("n",) * (self.normaliser == "count") + ("j",) * self.positional),
            query_map=self.query_map,
            key_map=self.key_map,
            positional=self.positional,
            scaled=self.scaled,
            normaliser=self.normaliser,
            logarithmic=self.logarithmic,
            decay=self.decay(),
            compiled_map=self.compiled_map,
            position_limit=self.position_limit,
        )

    def checked(self, inputs: Inputs) -> tuple[Call, torch.Size]:
        call, leading = inputs.checked(self.rule())
        positions = inputs.options["positions"]
        if self.uses_positions and not self.positional and positions is not None:
            check_distances(call, positions[0], positions[1], type(self).__name__.lower())
        return without_zero_bias(call), leading


def _real_tokens(work: LinearCall) -> Tensor | None:
    """Return which tokens (B, S) are not padding, if padding would age the state; otherwise None.

    A state that fades does so with every token that an engine sees. Positions count real tokens only, so
    padding must not reach the engine. Padding before the first token of all is harmless: nothing fades yet.
    """
    if work.rule.decay is None or work.call.visible is None or torch.compiler.is_compiling():
        return None
    real = present(work.call).any(1)
    harmless = real.all() if work.state is not None else real[:, -1].all()
    return None if bool(harmless) else real


def _by_sequence(run: Callable[[LinearCall], LinearResult], work: LinearCall, real: Tensor) -> LinearResult:
    """Return the result of each sequence without its padding; rows of padding are 0."""
    call, out, states = work.call, zeros(work.call), []
    for b, tokens in enumerate(real):
        state = None if work.state is None else work.state[[b]]
        index = tokens.nonzero()[:, 0]
        if state is None and not len(index):
            index = index.new_zeros(1)  # one token of padding makes a state of zeros
        if len(index):
            q, k, v = (x[[b]][:, :, index] for x in (call.q, call.k, call.v))
            counts = None if call.counts is None else call.counts[[b]][:, :, index]
            visible = present(call)[[b]][:, :, None, index]
            part = replace(call, q=q, k=k, v=v, visible=visible, counts=counts, positions=None)
            result = run(replace(work, call=part, state=state))
            out[b, :, index] = result.out[0]
            state = result.state
        assert state is not None  # of a cache, or of the tokens above
        states.append(state)
    return LinearResult(out, state=torch.cat(states))
