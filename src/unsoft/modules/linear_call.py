"""What linear attention asks of a checked call: is there anything to do,
and which keys are masked as a whole?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unsoft.engines.call import Call
from unsoft.tracing import readable


def is_empty(call: Call) -> bool:
    return 0 in (call.q.numel(), call.k.numel(), call.v.numel())


def zeros(call: Call) -> Tensor:
    """The output of a call without queries, keys or batch; gradients are 0."""
    nothing = sum(x.flatten()[:0].sum() for x in (call.q, call.k, call.v))
    return call.q.new_zeros(*call.q.shape[:3], call.v.shape[3]) + nothing


def without_zero_bias(call: Call) -> Call:
    """A float mask of 0 and -inf alone is a bool mask."""
    if call.bias is None or call.bias.requires_grad or torch.compiler.is_compiling():
        return call
    return call if not readable(call.bias) or bool(call.bias.any()) else replace(call, bias=None)


def hides_whole_keys(call: Call) -> bool:
    """Can masked keys be left out of all sums? Not if a mask depends on the query, and dropout does."""
    if call.bias is not None or call.dropout_p > 0:
        return False
    return call.visible is None or (call.visible.shape[2] == 1 and seen_keys(call) is not None)


def seen_keys(call: Call) -> Tensor | None:
    """Bool (B|1, Hk|1, S|1): the keys that are not masked; None if there is no mask,
    or the heads of a group disagree, or may do under vmap."""
    if call.visible is None:
        return None
    keys, shared = call.visible[:, :, 0], call.k.shape[1]
    if keys.shape[1] in (1, shared):
        return keys
    groups = keys.unflatten(1, (shared, -1))
    alike = readable(groups) and bool((groups == groups[:, :, :1]).all())
    return groups[:, :, 0] if alike else None


def present(call: Call) -> Tensor:
    """Bool (B, H|1, S): the keys that are not masked, where masks hide whole keys."""
    batch, keys = call.k.shape[0], call.k.shape[2]
    if call.visible is None:
        return torch.ones(batch, 1, keys, dtype=torch.bool, device=call.k.device)
    return call.visible[:, :, 0].expand(batch, -1, keys)
