"""Mechanisms of the delta rule: a state of fixed size that forgets what a key held before it is written anew.

A subclass says how much each token corrects and how much of the state it keeps (:meth:`Delta.gates`); the
rest is common. Queries and keys are brought to length 1, so ``scale`` has no effect. They look back only.

A masked key (padding) changes nothing. A mask that hides keys from some rows only is refused, and so are
float masks and dropout on weights: the state does not know rows. Weights, if asked for, are those that the
recurrence gives to the values.

Engines: "native" (compiled code) and "tiled" (torch) work in chunks, "dense" goes from token to token as
defined.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unsoft.engines.arguments import checked_call
from unsoft.engines.call import Call
from unsoft.engines.dense import visible_entries
from unsoft.engines.linear.delta import delta_attention, token_by_token
from unsoft.engines.linear.nonfinite import finite_call
from unsoft.engines.native.delta import compiled_delta, delta_failure
from unsoft.engines.native.direct import observed
from unsoft.engines.pointwise import native_unsupported
from unsoft.engines.registry import Engine, Registry, check_return_weights
from unsoft.modules.cache import Cache, StateCache
from unsoft.modules.linear_call import is_empty, without_zero_bias, zeros
from unsoft.modules.linear_decoding import call_of_new_tokens
from unsoft.modules.module import Inputs, Mechanism
from unsoft.modules.registry import resolve_formula
from unsoft.tracing import readable

EPS = 1e-6
"""Added to the square of a length before it is divided by."""
Recurrence = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DeltaWork:
    """A checked call and the way to run it by a recurrence."""

    call: Call
    run: Callable[[Recurrence], Tensor]


def _refused(reason: str) -> Callable[[DeltaWork], str]:
    return lambda work: reason


def _supported(work: DeltaWork) -> None:
    return None


def _native_unsupported(work: DeltaWork) -> str | None:
    if torch.compiler.is_compiling() or observed():
        return "compiled code goes past torch.compile, torch's modes and transforms; use 'tiled'"
    return native_unsupported(work.call)


def _native_unavailable(work: DeltaWork) -> str | None:
    return delta_failure(work.call.q.dtype == torch.float64)


def _never(work: DeltaWork) -> Tensor:
    raise AssertionError("an engine that is always refused")


DELTA: Registry[DeltaWork, Tensor] = Registry(
    [
        Engine(
            "native",
            _native_unsupported,
            lambda work: work.run(compiled_delta),
            unavailable=_native_unavailable,
        ),
        Engine("tiled", _supported, lambda work: work.run(delta_attention)),
        Engine("dense", _supported, lambda work: work.run(token_by_token)),
        Engine("triton", _refused("it runs formulas only, and this is the delta rule; use 'tiled'"), _never),
        Engine("sdpa", _refused("it computes softmax, and this is the delta rule; use 'tiled'"), _never),
    ],
)
"""All engines for the delta rule, the preferred ones first."""


def unit(x: Tensor) -> Tensor:
    """Vectors brought to length 1; 0 stays 0."""
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


class Delta(Mechanism):
    """See the module's docstring."""

    causal_only = uses_hidden = True

    @abstractmethod
    def gates(self, key: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """For keys (B, heads, S, D): how much a token corrects (B, heads, S), and the logarithm of what it
        keeps of the state, (B, heads, S, 1 or D), None for everything."""

    def new_cache(self, batch: int) -> Cache:
        return StateCache(batch)

    def attend(self, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        engine, weights = inputs.options["engine"], inputs.return_weights
        DELTA.check(engine)
        check_return_weights(weights, engine)
        if inputs.options["is_causal"] is False:
            raise ValueError(
                f"argument 'is_causal': {type(self).__name__} looks back only; pass is_causal=True"
            )
        call, leading = self.checked(inputs)
        if is_empty(call):
            out = zeros(call)
            none = call.q.new_zeros(*call.q.shape[:3], call.k.shape[2])
            return (_shaped(out, leading), _shaped(none, leading)) if weights else _shaped(out, leading)
        work = DeltaWork(call, lambda recurrence: self._whole(call, inputs.hidden, recurrence))
        with torch.autocast(call.q.device.type, enabled=False):
            out = DELTA.choose(engine, work).run(work)
            if not weights:
                return _shaped(out, leading)
            eye = torch.eye(call.k.shape[2], dtype=call.v.dtype, device=call.v.device)
            reading = replace(call, v=eye.expand(*call.k.shape[:2], -1, -1))
            written = self._whole(reading, inputs.hidden, delta_attention)
        return _shaped(out, leading), _shaped(written, leading)

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Tensor | tuple[Tensor, Tensor]:
        if not isinstance(cache, StateCache):
            raise TypeError(
                f"argument 'cache' is a {type(cache).__name__}; this mechanism's new_cache() makes another"
                " kind"
            )
        engine = inputs.options["engine"]
        DELTA.check(engine)
        call, leading = call_of_new_tokens(self, inputs, cache)
        if is_empty(call):
            cache.length += call.k.shape[2]
            return _shaped(zeros(call), leading)

        def run(recurrence: Recurrence) -> Tensor:
            out, state = self._summed(call, inputs.hidden, recurrence, cache.state)
            cache.advance(state, call.k.shape[2])
            return out

        work = DeltaWork(call, run)
        with torch.autocast(call.q.device.type, enabled=False):
            return _shaped(DELTA.choose(engine, work).run(work), leading)

    def checked(self, inputs: Inputs) -> tuple[Call, torch.Size]:
        """The call, with a key and value for every query head."""
        options = {name: x for name, x in inputs.options.items() if name not in ("engine", "positions")}
        call, leading = checked_call(
            inputs.query, inputs.key, inputs.value, resolve_formula("softmax"), **options
        )
        call = without_zero_bias(call)
        if call.bias is not None:
            raise ValueError(
                "argument 'attn_mask': the delta rule has no weight that a float mask could change; use a"
                " bool mask that hides whole keys"
            )
        if call.dropout_p > 0:
            raise ValueError("argument 'dropout_p': the delta rule forms no weights to drop; use 0")
        group = call.q.shape[1] // max(call.k.shape[1], 1)
        k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (call.k, call.v))
        return replace(call, k=k, v=v), leading

    def _whole(self, call: Call, hidden: Tensor | None, recurrence: Recurrence) -> Tensor:
        """A call without a cache, for any number of queries and keys."""
        offset, length, keys = call.causal_offset or 0, call.q.shape[2], call.k.shape[2]
        call, alive = _whole_keys(call)
        blind = min(max(-offset, 0), length)  # rows that come before the first key
        before = max(offset, 0)
        tokens = max(keys, before + length - blind)
        q = torch.nn.functional.pad(call.q[:, :, blind:], (0, 0, before, tokens - before - length + blind))
        more = (0, 0, 0, tokens - keys)
        there = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=q.device)
        there = torch.nn.functional.pad(there if call.visible is None else call.visible, (0, tokens - keys))
        k, v = (torch.nn.functional.pad(x, more) for x in (call.k, call.v))
        if hidden is not None and tokens != keys:
            raise ValueError(
                "argument 'is_causal': with hidden= there must be a key for every query, aligned with it"
            )
        moved = replace(call, q=q, k=k, v=v, visible=there, causal_offset=0)
        out, _ = self._summed(moved, hidden, recurrence, None)
        out = out[:, :, before : before + length - blind]
        out = torch.nn.functional.pad(out, (0, 0, blind, 0))
        return out if alive is None else torch.where(alive[..., None], out, 0.0)

    def _summed(
        self, call: Call, hidden: Tensor | None, recurrence: Recurrence, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As many queries as keys, after a state."""
        seen = None if call.visible is None else call.visible[:, :, 0]
        call, bad = finite_call(call, seen)
        q, k, v = (x.to(call.compute_dtype) for x in (call.q, call.k, call.v))
        if seen is not None:
            k, v = (torch.where(seen[..., None], x, 0.0) for x in (k, v))
        correct, keep = self.gates(k, hidden)
        if seen is not None:
            correct = torch.where(seen, correct, 0.0)
            keep = None if keep is None else torch.where(seen[..., None], keep, 0.0)
        out, state = recurrence(unit(q), unit(k), v, correct, keep, state)
        if bad is not None:
            out, state = bad.in_rows(out, 0), bad.in_state(state)
        return out.to(call.q.dtype), state


def _whole_keys(call: Call) -> tuple[Call, Tensor | None]:
    """The call with a mask of whole keys, and the rows (B|1, H|1, L) that see anything; ValueError if some
    row sees a part of the keys that others see."""
    if call.visible is None or call.visible.shape[2] == 1:
        return call, None
    visible = visible_entries(call)
    keys = visible.any(2, keepdim=True)
    alive = visible.any(-1)
    plain = visible_entries(replace(call, visible=keys))
    if not readable(visible):
        raise ValueError(
            "argument 'attn_mask': under torch.func.vmap the delta rule takes masks of whole keys only, shape"
            " (..., 1, keys)"
        )
    if not torch.compiler.is_compiling() and bool((alive[..., None] & (visible != plain)).any()):
        raise ValueError(
            "argument 'attn_mask': the delta rule keeps one state for all rows; a mask may hide whole keys"
            " or whole rows, not some keys from some rows"
        )
    return replace(call, visible=keys), alive


def _shaped(x: Tensor, leading: torch.Size) -> Tensor:
    return x.reshape(*leading, *x.shape[2:])
