"""An attention call and its sequences without padding: visible keys, and weights in blocks of rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unsoft.attention import attention
from unsoft.hf.attention import NAME, Swapped
from unsoft.hf.masks import Visibility
from unsoft.lab.interpret.models import Positions
from unsoft.statistics import RowStatistics

_BLOCK = 2**18  # numbers in a block of rows of all heads, as in the measures
_LEAST_ROWS = 16


@dataclass(frozen=True)
class AttentionCall:
    """One attention call: queries, keys and values (batch, heads, length, dim) as the function got them."""

    number: int
    """Index of the call in its forward pass, which inspection uses as the layer number."""
    name: str
    """Name of the module in the model."""
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scale: float
    options: dict[str, Any]
    """Further keyword arguments of the call."""
    output: Tensor
    """(batch, length, heads, dim)."""
    states: Tensor | None = None
    """The residual stream (batch, length, width) that entered the block."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos and sin of the rotary embedding, if the block got one."""

    @property
    def self_attention(self) -> bool:
        """True if the keys are those of the queries' own sequence."""
        return self.query.shape[-2] == self.key.shape[-2]


@dataclass(frozen=True)
class VisibleKeys:
    """Visibility of n keys for n rows."""

    kind: str
    """``full``, ``causal``, or ``other`` for windows and everything else."""
    table: Tensor | None = None
    """Bool (1 or heads, n, n), None if everything is visible."""
    bias: Tensor | None = None
    """What the mask adds to the logits (1 or heads, n, n), if it does more than hide."""


@dataclass(frozen=True)
class AttendedSequence:
    """Queries, keys and values (heads, n, dim) in float32 or wider; key heads may be fewer."""

    query: Tensor
    key: Tensor
    value: Tensor
    content_keys: Tensor
    """The keys without rotary positions, if the model has them, so that clones are equal at any position."""
    visible: VisibleKeys
    states: Tensor | None
    """(n, width)."""
    scale: float
    softcap: float | None
    dense: Tensor | None
    """(heads, n, n) of mechanisms whose rows cannot be computed one by one."""

    @property
    def heads(self) -> int:
        return len(self.query) if self.dense is None else len(self.dense)

    @property
    def per_key_head(self) -> int:
        """Number of heads that share one key head."""
        return self.heads // len(self.key)

    @property
    def length(self) -> int:
        return self.key.shape[-2]

    def values_by_head(self) -> Tensor:
        """Return the values (heads, n, dim), repeated for heads that share them."""
        return self.value.repeat_interleave(self.heads // len(self.value), 0)

    def row_blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield (row numbers, weights (heads, rows, keys), visible or None) over rows that see two or more
        keys.

        A row with a single visible key has no choice, so its numbers carry no information. ``keys`` can be
        less than n if the rest is hidden from all rows of the block.
        """
        causal = self.visible.kind == "causal"
        first = 1 if causal or self.length == 1 else 0
        step = max(_LEAST_ROWS, _BLOCK // max(1, self.heads * self.length))
        for start in range(first, self.length, step):
            stop = min(start + step, self.length)
            keys = stop if causal else self.length
            table = None if self.visible.table is None else self.visible.table[:, start:stop, :keys]
            weights = self._rows(start, stop, table, keys)
            numbers = torch.arange(start, stop, device=weights.device)
            if self.visible.kind == "other" and table is not None:
                choice = (table.sum(-1) > 1).all(0)
                numbers, weights, table = numbers[choice], weights[:, choice], table[:, choice]
            yield numbers, weights, table

    def statistics(self) -> RowStatistics | None:
        """Return statistics of all rows from the kernel; None if the weights are not a plain softmax, or if
        the mask depends on the head."""
        table, bias = self.visible.table, self.visible.bias
        if self.dense is not None or self.softcap is not None or (table is not None and len(table) > 1):
            return None
        mask = table if self.visible.kind == "other" else None
        if bias is not None:
            mask = bias if table is None else bias.masked_fill(~table, -torch.inf)
        causal = self.visible.kind == "causal"
        nothing = self.value[..., :0]  # weights do not depend on values
        options: dict[str, Any] = {"is_causal": causal, "scale": self.scale, "enable_gqa": True}
        return attention(self.query, self.key, nothing, "softmax", mask, return_stats=True, **options)[1]

    def whole(self) -> Tensor:
        """Return all weights at once (heads, n, n), for short sequences."""
        weights = self._rows(0, self.length, self.visible.table, self.length)
        return weights if self.visible.table is None else torch.where(self.visible.table, weights, 0.0)

    def _rows(self, start: int, stop: int, table: Tensor | None, keys: int) -> Tensor:
        if self.dense is not None:
            return self.dense[:, start:stop, :keys]
        bias = None if self.visible.bias is None else self.visible.bias[:, start:stop, :keys]
        if self.visible.kind == "causal" and table is not None:
            table = table[..., start:]  # earlier keys are visible to all rows
        query, key = self.query[:, start:stop], self.key[:, :keys]
        return softmax_rows(query, key, self.scale, table, bias, self.softcap)


def sequences(call: AttentionCall, kept: Sequence[Positions]) -> Iterator[AttendedSequence]:
    """Yield the sequences of a batch; ``kept`` are the positions of each that are not padding."""
    content = content_keys(call)
    swapped = swapped_in(call.module)
    for item, positions in enumerate(kept):

        def part(x: Tensor, item: int = item, positions: Positions = positions) -> Tensor:
            x = x[item][..., positions, :]
            return x.float() if x.dtype.itemsize < 4 else x

        visible = visible_keys(call, item, positions)
        query, key, value = part(call.query), part(call.key), part(call.value)
        states = None if call.states is None else part(call.states)
        softcap, dense = call.options.get("softcap"), None
        if swapped is not None:
            table = visible.table[None] if visible.kind == "other" and visible.table is not None else None
            options = {"causal": is_causal(call), "scaling": call.scale, "return_weights": True}
            options["unsoft_angles"] = _angles(call, item, positions)
            dense = swapped(query[None], key[None], value[None], table, **options)[1][0]
        yield AttendedSequence(query, key, value, part(content), visible, states, call.scale, softcap, dense)


def content_keys(call: AttentionCall) -> Tensor:
    """Return the keys as they were before the rotary embedding, or unchanged if there was none.

    A rotation by the negative angle undoes it, however the model's own function pairs the dimensions. The
    result is rotated forwards again as a check; if that does not give the keys, they are returned as
    attention sees them.
    """
    rotate = getattr(sys.modules[type(call.module).__module__], "apply_rotary_pos_emb", None)
    if call.rotary is None or rotate is None:
        return call.key
    try:
        cos, sin = call.rotary
        _, content = rotate(call.key, call.key, cos, -sin)
        _, again = rotate(content, content, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # a function of the same name with other arguments
        return call.key
    # Loose enough for two rotations in bfloat16; a wrong pairing of dimensions is off by the size of a key.
    close = torch.allclose(again, call.key, atol=1e-3 * float(call.key.abs().max()), rtol=1e-2)
    return content if close else call.key


def visible_keys(call: AttentionCall, item: int, kept: Positions) -> VisibleKeys:
    """Read the visibility of one sequence from the mask; ``kept`` are its positions that are not padding."""
    mask = call.mask.table() if isinstance(call.mask, Visibility) else call.mask
    n = len(call.query[item, 0, kept])
    if mask is None:
        if not is_causal(call):
            return VisibleKeys("full")
        return VisibleKeys("causal", _causal(n, call.query.device))
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise ValueError(
            f"inspect: the attention of {call.name} got a mask of type"
            f" {type(mask).__name__}{list(mask.shape) if isinstance(mask, Tensor) else ''}, from which"
            " visibility cannot be read; load the model with attn_implementation='sdpa' or 'eager'"
        )
    table = mask[item if len(mask) > 1 else 0]
    table = table.expand(len(table), call.query.shape[-2], call.key.shape[-2])
    if mask.shape[-2] == 1 and hasattr(call.module, NAME) and is_causal(call):
        table = table & _causal(table.shape[-1], table.device)  # a swapped mechanism's mask has no rows
    table = table[:, kept][:, :, kept]
    bias = None
    if table.dtype != torch.bool:
        # A mask may add a bias to the lowest number, so anything below half of it means hidden.
        logits, table = table, table > torch.finfo(table.dtype).min / 2
        bias = torch.where(table, logits, 0.0)
        bias = bias if bool(bias.any()) else None
    if bool(table.all()):
        return VisibleKeys("full", bias=bias)
    triangle = _causal(n, table.device)
    if torch.equal(table, triangle.expand_as(table)):
        return VisibleKeys("causal", triangle, bias)
    return VisibleKeys("other", table, bias)


def is_causal(call: AttentionCall) -> bool:
    """Return True if the attention is causal without a mask."""
    explicit = call.options.get("is_causal")
    if explicit is not None:
        return bool(explicit)
    config = getattr(call.module, "config", None)
    return bool(getattr(call.module, "is_causal", True) and getattr(config, "is_causal", True))


@lru_cache(maxsize=2)
def _causal(n: int, device: torch.device) -> Tensor:
    return torch.ones(1, n, n, dtype=torch.bool, device=device).tril()


def softmax_rows(
    query: Tensor,
    key: Tensor,
    scale: float,
    visible: Tensor | None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the weights (heads, rows, keys) of stock attention for some of its rows.

        s = scale q . k        softcap: s = c tanh(s / c)        a = softmax(s + bias over visible keys)

    ``key`` may have fewer heads than ``query``. ``visible`` may be about the last keys only if all others are
    visible. A row without visible keys has weights 0.

    >>> softmax_rows(torch.zeros(2, 1, 4), torch.zeros(1, 2, 4), 0.5, None)
    tensor([[[0.5000, 0.5000]],
            [[0.5000, 0.5000]]])
    """
    heads, rows, dim = query.shape
    shared = (query * scale).reshape(len(key), -1, dim)
    logits = (shared @ key.mT).view(heads, rows, -1)
    if softcap is not None:
        logits = (logits / softcap).tanh_().mul_(softcap)
    if bias is not None:
        logits += bias
    if visible is None:
        return logits.softmax(-1)
    # The smallest number instead of -inf: a row without visible keys would become NaN.
    last = visible.shape[-1]
    logits[..., logits.shape[-1] - last :].masked_fill_(~visible, torch.finfo(logits.dtype).min)
    weights = logits.softmax(-1)
    some = last < weights.shape[-1] or bool(visible.any(-1).all())
    return weights if some else torch.where(visible, weights, 0.0)


def swapped_in(module: nn.Module) -> Swapped | None:
    """Return what :func:`unsoft.hf.swap` put into an attention module, None for stock attention."""
    swapped = getattr(module, NAME, None)
    return swapped if isinstance(swapped, Swapped) else None


def _angles(call: AttentionCall, item: int, kept: Positions) -> Any:
    """Return the angles of rotary keys of one sequence, if a mechanism compares the keys before rotation."""
    angles = call.options.get("unsoft_angles")
    if angles is None:
        return None
    return tree_map(lambda x: x[kept] if x.dim() == 2 else x[item % len(x)][None, kept], angles)
