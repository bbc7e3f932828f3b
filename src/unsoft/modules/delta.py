"""Mechanisms of the delta rule: a state of fixed size that erases the old value of a key before it writes the
new one.

A subclass defines how much each token corrects and how much of the state it keeps (:meth:`Delta.gates`); the
rest is common. Queries and keys are normalised to length 1, so ``scale`` has no effect. They are causal only.

A masked key (padding) changes nothing. A mask that hides keys from some rows only is unsupported, and so are
float masks and dropout on weights: the state does not distinguish rows. Returned weights are the factors of
the values in the output.

Engines: "native" (compiled code) and "tiled" (torch) work in chunks, "dense" goes from token to token as
defined.
"""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from unsoft.engines.arguments import with_leading
from unsoft.engines.call import Call
from unsoft.engines.dense import visible_entries
from unsoft.engines.linear.call import finite_call, is_empty, without_zero_bias, zero_weights, zeros
from unsoft.engines.linear.delta import DELTA, DeltaCall
from unsoft.engines.registry import check_return_weights
from unsoft.modules.cache import Cache, StateCache, of_kind
from unsoft.modules.linear import Recurrent
from unsoft.modules.module import Inputs, Result
from unsoft.tracing import readable

EPS = 1e-6
"""Added to the square of a length before it is divided by."""


def unit(x: Tensor) -> Tensor:
    """Return vectors with length 1; 0 stays 0."""
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


class Delta(Recurrent):
    """See the module's docstring."""

    causal_only = uses_hidden = True

    @abstractmethod
    def gates(self, key: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return for keys (B, heads, S, D) how much a token corrects (B, heads, S), and the logarithm of what
        it keeps of the state (B, heads, S, 1 or D), None for everything."""

    def attend(self, inputs: Inputs) -> Result:
        engine, weights = inputs.options["engine"], inputs.return_weights
        DELTA.check(engine)
        check_return_weights(weights, engine)
        call, leading = self.checked(inputs)
        if is_empty(call):
            out, written = zeros(call), zero_weights(call)
        else:
            with torch.autocast(call.q.device.type, enabled=False):
                out = self._whole(call, inputs.hidden, engine)
                if weights:  # the output is linear in the values: unit vectors show the weight of each
                    eye = torch.eye(call.k.shape[2], dtype=call.v.dtype, device=call.v.device)
                    reading = replace(call, v=eye.expand(*call.k.shape[:2], -1, -1))
                    written = self._whole(reading, inputs.hidden, "tiled")
        out = with_leading(out, leading)
        return (out, with_leading(written, leading)) if weights else out

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        cache, engine = of_kind(StateCache, cache), inputs.options["engine"]
        DELTA.check(engine)
        call, leading = self.call_of_new_tokens(inputs, cache)
        if is_empty(call):
            cache.length += call.k.shape[2]
            return with_leading(zeros(call), leading)
        with torch.autocast(call.q.device.type, enabled=False):
            out, state = self._summed(call, inputs.hidden, engine, cache.state)
        cache.advance(state, call.k.shape[2])
        return with_leading(out, leading)

    def checked(self, inputs: Inputs) -> tuple[Call, torch.Size]:
        """Return the checked call with a key and value for every query head."""
        call, leading = inputs.checked(positions=None)
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

    def _whole(self, call: Call, hidden: Tensor | None, engine: str) -> Tensor:
        """Return the output of a call without a cache, for any number of queries and keys."""
        # The recurrence needs a query and a key for every token. Rows before the first key output 0, keys
        # before the first row get zero queries, and rows after the last key get masked keys.
        offset, length, keys = call.causal_offset or 0, call.q.shape[2], call.k.shape[2]
        call, alive = _whole_keys(call)
        blind = min(max(-offset, 0), length)  # rows that come before the first key
        before = max(offset, 0)
        tokens = max(keys, before + length - blind)
        q = torch.nn.functional.pad(call.q[:, :, blind:], (0, 0, before, tokens - before - length + blind))
        more = (0, 0, 0, tokens - keys)
        visible = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=q.device)
        visible = visible if call.visible is None else call.visible
        visible = torch.nn.functional.pad(visible, (0, tokens - keys))
        k, v = (torch.nn.functional.pad(x, more) for x in (call.k, call.v))
        if hidden is not None and tokens != keys:
            raise ValueError(
                "argument 'is_causal': with hidden= there must be a key for every query, aligned with it"
            )
        moved = replace(call, q=q, k=k, v=v, visible=visible, causal_offset=0)
        out, _ = self._summed(moved, hidden, engine, None)
        out = out[:, :, before : before + length - blind]
        out = torch.nn.functional.pad(out, (0, 0, blind, 0))
        return out if alive is None else torch.where(alive[..., None], out, 0.0)

    def _summed(
        self, call: Call, hidden: Tensor | None, engine: str, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the state after it, for as many queries as keys."""
        seen = None if call.visible is None else call.visible[:, :, 0]
        call, bad = finite_call(call, seen)
        q, k, v = (x.to(call.compute_dtype) for x in (call.q, call.k, call.v))
        if seen is not None:
            k, v = (torch.where(seen[..., None], x, 0.0) for x in (k, v))
        correct, keep = self.gates(k, hidden)
        if seen is not None:  # padding: correct nothing, keep everything (log 1 = 0), whatever its gates are
            correct = torch.where(seen, correct, 0.0)
            keep = None if keep is None else torch.where(seen[..., None], keep, 0.0)
        work = DeltaCall(unit(q), unit(k), v, correct, keep, state)
        out, state = DELTA.choose(engine, work).run(work)
        if bad is not None:
            out, state = bad.in_rows(out, 0), bad.in_state(state)
        return out.to(call.q.dtype), state


def _whole_keys(call: Call) -> tuple[Call, Tensor | None]:
    """Return the call with a mask of whole keys, and the rows (B|1, H|1, L) that see anything. Raise
    ValueError if some row sees a part of the keys that others see."""
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
