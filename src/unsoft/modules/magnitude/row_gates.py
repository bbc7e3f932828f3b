"""causal="prefix": every row has gates of its own, computed a block of rows at a time and never kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from unsoft.magnitude.streaming import ExactArrival
from unsoft.modules.cache import KeyValueCache
from unsoft.modules.gated_mass import MassGate, weighted_values
from unsoft.modules.magnitude.cache import MagnitudeCache
from unsoft.modules.module import Inputs

if TYPE_CHECKING:
    from unsoft.mechanisms.magnitude import Magnitude

Result = Tensor | tuple[Tensor, Tensor]
_ROWS = 128


def attend_by_rows(
    layer: Magnitude, inputs: Inputs, m: Tensor, y: Tensor, before: Tensor | None, offset: int
) -> tuple[Result, Tensor]:
    """Attention in which row i has the weights of the first i + offset + 1 keys; also the weights of the last
    row.

    M and y (systems, keys, ...) are those of all keys; ``before`` are the weights of the prefix before the
    first row.
    """
    engine = inputs.options["engine"]
    if engine not in ("auto", "dense"):
        raise ValueError(
            "magnitude: argument 'engine': causal='prefix' writes the weights of every row out, as 'dense'"
            f" does; {engine!r} does not"
        )
    inputs = inputs.as_autocast()
    rows, keys = inputs.query.shape[-2], inputs.key.shape[-2]
    if rows + offset > keys:  # rows after the last key: fill up with keys that are masked
        more = rows + offset - keys
        wider = _with_masked_keys(inputs, more)
        result, last = attend_by_rows(
            layer, wider, pad(m, (0, more, 0, more)), pad(y, (0, more)), before, offset
        )
        return (result[0], result[1][..., :keys]) if inputs.return_weights else result, last
    start = min(max(-offset, 0), rows)  # rows before the first key
    first = start + offset
    if before is None:
        carry = y.new_zeros(len(y), keys) if first <= 0 else (y[:, :first, None] * m[:, :first]).sum(1)
    else:
        carry = pad(before, (0, keys - before.shape[1]))
    parts = [_nothing(layer, inputs, start)]
    differentiable = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    for low in range(start, rows, _ROWS):
        block = _Block(layer, inputs, low, min(low + _ROWS, rows), offset)
        arguments = (m[:, : block.seen], y, carry)
        *part, carry = (
            checkpoint(block, *arguments, use_reentrant=False) if differentiable else block(*arguments)
        )
        parts.append(part)
    joined = [torch.cat(part, dim=-2) for part in zip(*parts, strict=True)]
    return ((joined[0], joined[1]) if inputs.return_weights else joined[0]), carry


def attend_by_rows_cached(layer: Magnitude, inputs: Inputs, cache: MagnitudeCache) -> Result:
    """A step of decoding, once the new keys have arrived."""
    assert isinstance(cache.inner, KeyValueCache) and isinstance(cache.arriving, ExactArrival)
    keys, values = cache.inner.append(inputs.key, inputs.value)
    whole = inputs.change(key=keys, value=values, options=inputs.options | {"is_causal": "lower_right"})
    if inputs.query.numel() == 0 or keys.numel() == 0:
        return layer.attend(whole)
    window, rows = cache.arriving.window, inputs.query.shape[-2]
    before = (
        cache.last_row if rows == inputs.key.shape[-2] else None
    )  # it is the row before the first new key
    result, cache.last_row = attend_by_rows(layer, whole, window.m, window.y, before, cache.length - rows)
    return result


def _with_masked_keys(inputs: Inputs, more: int) -> Inputs:
    mask = inputs.options["attn_mask"]
    if mask is None:
        mask = torch.ones(inputs.key.shape[-2], dtype=torch.bool, device=inputs.key.device)[None]
    elif mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], inputs.key.shape[-2])
    mask = pad(mask, (0, more), value=False if mask.dtype == torch.bool else -torch.inf)
    key, value = (pad(x, (0, 0, 0, more)) for x in (inputs.key, inputs.value))
    options = inputs.options | {"attn_mask": mask}
    if options["positions"] is not None:
        options["positions"] = (options["positions"][0], pad(options["positions"][1], (0, more)))
    return inputs.change(key=key, value=value, options=options)


def _nothing(layer: Magnitude, inputs: Inputs, rows: int) -> list[Tensor]:
    """What rows that see no key give."""
    shape = (*inputs.query.shape[:-3], layer.layer_spec.heads, rows)
    out = inputs.query.new_zeros(*shape, inputs.value.shape[-1])
    return [out, inputs.query.new_zeros(*shape, inputs.key.shape[-2])] if inputs.return_weights else [out]


class _Block:
    """Rows low to high."""

    def __init__(self, layer: Magnitude, inputs: Inputs, low: int, high: int, offset: int) -> None:
        self.layer = layer
        self.keys = inputs.key.shape[-2]
        self.first, self.seen = low + offset, high + offset
        options = dict(inputs.options)
        mask = options["attn_mask"]
        if mask is not None:
            mask = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., low:high, :]
            options["attn_mask"] = mask if mask.shape[-1] == 1 else mask[..., : self.seen]
        options["is_causal"] = "lower_right"
        if options["positions"] is not None:
            queries, keys = options["positions"]
            options["positions"] = queries[..., low:high], keys[..., : self.seen]
        self.inputs = inputs.change(
            query=inputs.query[..., low:high, :],
            key=inputs.key[..., : self.seen, :],
            value=inputs.value[..., : self.seen, :],
            hidden=None if inputs.hidden is None else inputs.hidden[..., low:high, :],
            options=options,
            return_weights=True,
        )
        self.return_weights = inputs.return_weights

    def __call__(self, m: Tensor, y: Tensor, carry: Tensor) -> tuple[Tensor, ...]:
        new = slice(self.first, self.seen)
        table = torch.cat(
            [carry[:, None, : self.seen], y[:, new, None] * m[:, new, : self.seen]], dim=1
        ).cumsum(1)
        last = pad(table[:, -1], (0, self.keys - self.seen))
        table = table[:, 1:]
        batch = self.inputs.key.shape[:-2]
        weights = table.reshape(-1, batch[-1], *table.shape[1:])
        gate = self.layer.gate(weights).reshape(*batch, *table.shape[1:])
        out, weights = self._attend(gate)
        return (out, pad(weights, (0, self.keys - self.seen)), last) if self.return_weights else (out, last)

    def _attend(self, gate: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.layer.inner
        if isinstance(inner, MassGate):
            found = inner.attend_gated(self.inputs, gate)
            assert isinstance(found, tuple)
            return found
        p = self.inputs.options["dropout_p"]
        _, weights = inner.attend(self.inputs.change(options=self.inputs.options | {"dropout_p": 0.0}))
        every = weights.shape[-3] // gate.shape[-3]
        weights = weights * gate.repeat_interleave(every, dim=-3).to(weights.dtype)
        return weighted_values(weights, self.inputs.value, p), weights
