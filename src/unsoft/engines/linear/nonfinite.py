"""NaN and Inf in linear attention, at linear cost: a row is NaN iff it sees a bad query or key,
a column iff it sees a bad value.

The sums are made without the bad numbers, and what depends on them is set to NaN afterwards; a state that has
taken one in is NaN itself, so that all later rows are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unsoft.engines.call import Call
from unsoft.tracing import readable


@dataclass(frozen=True)
class Bad:
    """Where a call is not finite."""

    queries: Tensor
    """(B, H, L)"""
    keys: Tensor
    """(B, Hk, S)"""
    values: Tensor
    """(B, Hk, S, Dv)"""

    def in_rows(self, out: Tensor, offset: int | None) -> Tensor:
        """The output (B, H, L, Dv) with NaN where a row sees something bad: keys up to i + offset, or all."""
        seen = _seen(self.keys[..., None] | self.values, offset, out.shape[2])
        group = out.shape[1] // seen.shape[1]
        return torch.where(seen.repeat_interleave(group, dim=1) | self.queries[..., None], torch.nan, out)

    def in_state(self, state: Tensor) -> Tensor:
        """The state (B, heads, F, Dv + 1 or more) after the keys and values."""
        group = state.shape[1] // self.keys.shape[1]
        columns = (self.keys[..., None] | self.values).any(2).repeat_interleave(group, dim=1)
        totals = self.keys.any(2).repeat_interleave(group, dim=1)[..., None]
        more = state.shape[3] - columns.shape[2]
        bad = torch.cat([columns, totals.expand(-1, -1, more)], dim=-1)[:, :, None]
        return torch.where(bad, torch.nan, state)


def finite_call(call: Call, seen: Tensor | None) -> tuple[Call, Bad | None]:
    """The call with 0 for what is not finite, and where that was; ``seen`` (B|1, Hk|1, S|1):
    keys that are not masked.

    On the CPU a sum tells whether anything is bad at all. Elsewhere the answer would have to be waited for,
    and under vmap there is one for every element, so there it is not asked.
    """
    if torch.compiler.is_compiling():  # cannot ask for values while tracing
        return call, None
    given = (call.q, call.k, call.v)
    dtype = call.compute_dtype
    if (
        call.q.device.type == "cpu"
        and readable(*given)
        and all(bool(x.detach().sum(dtype=dtype).isfinite()) for x in given)
    ):
        return call, None
    fine = [(x.detach() - x.detach()) == 0 for x in given]  # isfinite() reads everything four times
    q, k, v = (torch.where(good, x, 0.0) for good, x in zip(fine, given, strict=True))
    keys, values = ~fine[1].all(-1), ~fine[2]
    if seen is not None:
        keys, values = keys & seen, values & seen[..., None]
    return replace(call, q=q, k=k, v=v), Bad(~fine[0].all(-1), keys, values)


def _seen(bad: Tensor, offset: int | None, rows: int) -> Tensor:
    """(B, Hk, L, X): is any key bad that a row sees?"""
    if offset is None:
        return bad.any(2, keepdim=True)
    so_far = bad.cumsum(2, dtype=torch.int32) > 0
    last = torch.arange(rows, device=bad.device) + offset
    found = so_far[:, :, last.clamp(0, bad.shape[2] - 1)]
    return found & (last >= 0)[:, None]
