"""One call of linear attention: its rule, the state before it, and what masks and non-finite numbers mean
for it.

NaN and Inf cost linear time too: a row is NaN iff it sees a bad query or key, a column iff it sees a bad
value. The sums are made without the bad numbers, and what depends on them is set to NaN afterwards. A state
that includes a bad number is NaN itself, so that all later rows are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.engines.call import Call, Needs
from unsoft.engines.dense import visible_entries
from unsoft.tracing import readable


@dataclass(frozen=True)
class LinearRule(Needs):
    """Definition of the weights of linear attention: feature maps, normaliser and decay."""

    query_map: Callable[..., Tensor] = torch.relu
    """From (..., length, D) to features (..., length, F), or their logarithms."""
    key_map: Callable[..., Tensor] = torch.relu
    positional: bool = False
    """The maps take the positions (B|1, length) of the tokens as a second argument."""
    scaled: bool = False
    """The maps get q and k times sqrt(scale), so that a dot product of them is the logit."""
    normaliser: str = "sum"
    logarithmic: bool = False
    """The maps return the logarithms of positive features."""
    decay: Tensor | None = None
    """(H,) factor per token of distance."""
    compiled_map: str | None = None
    """Name of the map in compiled code (engines/native/step.py), if it is there."""
    position_limit: int = 1
    """The M of the compiled map "cosine"."""

    def scales(self, scale: float) -> tuple[float, float]:
        """Return the factors of queries and keys."""
        root = abs(scale) ** 0.5
        return (root if scale >= 0 else -root, root) if self.scaled else (1.0, 1.0)


@dataclass(frozen=True)
class LinearCall:
    """Everything that an engine of linear attention needs."""

    call: Call
    state: Tensor | None = None
    """Sums over the tokens before the call."""
    first: int = 0
    """Number of tokens before the call."""
    cached: bool = False
    """The state after the call is needed: these are new tokens of a cache."""
    weights: bool = False
    """The weights are needed besides the output."""

    @property
    def rule(self) -> LinearRule:
        if not isinstance(self.call.rule, LinearRule):
            raise TypeError(f"a rule of linear attention is needed, not {type(self.call.rule).__name__}")
        return self.call.rule

    def sum_options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the keywords of :func:`unsoft.engines.linear.attention.linear_attention` that come from the
        rule."""
        rule = self.rule
        decay = None if rule.decay is None else rule.decay.to(dtype)
        return {"normalise": rule.normaliser == "sum", "decay": decay, "logarithmic": rule.logarithmic}

    def features(self, call: Call, first_query: int, first_key: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features of queries and keys, and the values, of a part of the call in the dtype of the
        arithmetic. Those of masked keys add nothing to any sum."""
        rule = self.rule
        q, k, v = (x.to(call.compute_dtype) for x in (call.q, call.k, call.v))
        if rule.scaled:
            of_queries, of_keys = rule.scales(call.scale)
            q, k = q * of_queries, k * of_keys
        if rule.positional:
            if call.positions is None:
                queries, keys = (
                    torch.arange(first, first + x.shape[2], device=x.device)[None]
                    for x, first in ((q, first_query), (k, first_key))
                )
            else:
                queries, keys = call.positions.split([q.shape[2], k.shape[2]], dim=1)
            fq, fk = rule.query_map(q, queries), rule.key_map(k, keys)
        else:
            fq, fk = rule.query_map(q), rule.key_map(k)
        seen = seen_keys(call)
        if seen is not None:
            seen = seen[..., None]
            fk, v = torch.where(seen, fk, -torch.inf if rule.logarithmic else 0.0), torch.where(seen, v, 0.0)
        return fq, fk, v


class LinearResult(NamedTuple):
    """Output, the weights if they were formed, and the state after the call if it is cached."""

    out: Tensor
    weights: Tensor | None = None
    state: Tensor | None = None


def is_empty(call: Call) -> bool:
    return 0 in (call.q.numel(), call.k.numel(), call.v.numel())


def zeros(call: Call) -> Tensor:
    """Return the output of a call without queries, keys or batch; gradients are 0."""
    nothing = sum(x.flatten()[:0].sum() for x in (call.q, call.k, call.v))
    return call.q.new_zeros(*call.q.shape[:3], call.v.shape[3]) + nothing


def zero_weights(call: Call) -> Tensor:
    """Return the weights of a call without queries, keys or batch."""
    return call.q.new_zeros(*call.q.shape[:3], call.k.shape[2])


def without_zero_bias(call: Call) -> Call:
    """Return the call with a float mask of 0 and -inf alone as a bool mask."""
    if call.bias is None or call.bias.requires_grad or torch.compiler.is_compiling():
        return call
    return call if not readable(call.bias) or bool(call.bias.any()) else replace(call, bias=None)


def hides_whole_keys(call: Call) -> bool:
    """Return True if masked keys can be left out of all sums. Not if a mask depends on the query, and dropout
    does."""
    if call.bias is not None or call.dropout_p > 0:
        return False
    return call.visible is None or (call.visible.shape[2] == 1 and seen_keys(call) is not None)


def seen_keys(call: Call) -> Tensor | None:
    """Return bool (B|1, Hk|1, S|1): the keys that are not masked. None if there is no mask, or the heads of a
    group disagree, or may do under vmap."""
    if call.visible is None:
        return None
    keys, shared = call.visible[:, :, 0], call.k.shape[1]
    if keys.shape[1] in (1, shared):
        return keys
    groups = keys.unflatten(1, (shared, -1))
    alike = readable(groups) and bool((groups == groups[:, :, :1]).all())
    return groups[:, :, 0] if alike else None


def present(call: Call) -> Tensor:
    """Return bool (B, H|1, S): the keys that are not masked, where masks hide whole keys."""
    batch, keys = call.k.shape[0], call.k.shape[2]
    if call.visible is None:
        return torch.ones(batch, 1, keys, dtype=torch.bool, device=call.k.device)
    return call.visible[:, :, 0].expand(batch, -1, keys)


def check_distances(call: Call, queries: Tensor, keys: Tensor, name: str) -> None:
    """Raise ValueError unless the positions of every query and the keys it sees differ as their indices in
    the call do, for mechanisms that take distances from the order of the tokens.

    A row whose own key no row sees is padding, which has no position, though it may see other keys.
    While a graph is traced, values cannot be read.
    """
    length, count, device = call.q.shape[2], call.k.shape[2], call.q.device
    if torch.compiler.is_compiling() or length * count == 0:
        return
    order = torch.arange(length, device=device) + (call.causal_offset or 0)
    i, j = queries - order, keys - torch.arange(count, device=device)  # equal where order and position agree
    if call.visible is not None and call.visible.shape[2] > 1:
        visible = visible_entries(call).any(1)
        row_present = visible.any(1)[:, order.clamp(0, count - 1)]
        wrong = visible & row_present[..., None] & (i.view(-1, length, 1) != j.view(-1, 1, count))
    else:
        visible = torch.ones(1, count, dtype=torch.bool, device=device)
        visible = visible if call.visible is None else visible & call.visible[:, :, 0].any(1)
        shift = torch.where(visible, j, -torch.inf).amax(-1, keepdim=True)
        row_present = visible[:, order.clamp(0, count - 1)]
        wrong = torch.cat([(j != shift) & visible, (i != shift) & row_present], dim=-1)
    if not readable(wrong):
        raise ValueError(
            f"argument 'positions': {name} depends on distances only, and under vmap it cannot be checked"
            " that positions are consecutive; map over the other arguments"
        )
    if bool(wrong.any()):
        raise ValueError(
            f"{name}: argument 'positions' must be consecutive: its weights depend on distances, which it"
            " takes from the order of the tokens"
        )


@dataclass(frozen=True)
class Bad:
    """Positions of the entries of a call that are not finite."""

    queries: Tensor
    """(B, H, L)"""
    keys: Tensor
    """(B, Hk, S)"""
    values: Tensor
    """(B, Hk, S, Dv)"""

    def in_rows(self, out: Tensor, offset: int | None) -> Tensor:
        """Return the output (B, H, L, Dv) with NaN where a row sees something bad among the keys up to i +
        offset, or among all keys."""
        bad = self.keys[..., None] | self.values
        if offset is None:
            seen = bad.any(2, keepdim=True)
        else:
            last = torch.arange(out.shape[2], device=bad.device) + offset
            so_far = bad.cumsum(2, dtype=torch.int32) > 0
            seen = so_far[:, :, last.clamp(0, bad.shape[2] - 1)] & (last >= 0)[:, None]
        group = out.shape[1] // seen.shape[1]
        return torch.where(seen.repeat_interleave(group, dim=1) | self.queries[..., None], torch.nan, out)

    def in_state(self, state: Tensor) -> Tensor:
        """Return the state (B, heads, F, Dv + 1 or more) after the keys and values, with NaN in it."""
        group = state.shape[1] // self.keys.shape[1]
        columns = (self.keys[..., None] | self.values).any(2).repeat_interleave(group, dim=1)
        totals = self.keys.any(2).repeat_interleave(group, dim=1)[..., None]
        more = state.shape[3] - columns.shape[2]
        bad = torch.cat([columns, totals.expand(-1, -1, more)], dim=-1)[:, :, None]
        return torch.where(bad, torch.nan, state)


def finite_call(call: Call, seen: Tensor | None) -> tuple[Call, Bad | None]:
    """Return the call with 0 for what is not finite, and where that was; ``seen`` (B|1, Hk|1, S|1): keys that
    are not masked.

    On the CPU a sum tells whether anything is bad at all. Elsewhere reading it would make the CPU wait, and
    under vmap there is one for every element, so all tensors are searched there.
    """
    if torch.compiler.is_compiling():  # values cannot be read while tracing
        return call, None
    tensors = (call.q, call.k, call.v)
    dtype = call.compute_dtype
    if _is_cheap_to_read(*tensors) and all(bool(x.detach().sum(dtype=dtype).isfinite()) for x in tensors):
        return call, None
    fine = [(x.detach() - x.detach()) == 0 for x in tensors]  # isfinite() reads everything four times
    q, k, v = (torch.where(good, x, 0.0) for good, x in zip(fine, tensors, strict=True))
    keys, values = ~fine[1].all(-1), ~fine[2]
    if seen is not None:
        keys, values = keys & seen, values & seen[..., None]
    return replace(call, q=q, k=k, v=v), Bad(~fine[0].all(-1), keys, values)


def _is_cheap_to_read(*tensors: Tensor) -> bool:
    return tensors[0].device.type == "cpu" and readable(*tensors)
