"""Masks and positions of a swapped model's tokens.

transformers requests one mask per forward pass. Plain causal or full attention needs none, or with padding
one bool per key (batch, 1, 1, keys); causality is a property of the attention module. Mechanisms that use all
keys together then see which keys exist, and kernels skip masked keys. Windows, packed sequences and static
caches get the whole table (batch, 1, queries, keys).

Positions, the symbols i and j of a formula, are the model's ``position_ids``. Padding does not count: if a
model numbers padding too, the tokens of each text are numbered from 0 instead, as ``generate`` does. A cache
holds keys without their positions, so earlier keys are assumed to precede the new ones without a gap;
positions with gaps raise ValueError where a cache would lose them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask


@dataclass(frozen=True)
class MaskedKeys:
    """The keys that a mask covers, where its shape does not determine them.

    Attached to the mask as ``unsoft_shown``.
    """

    first_query: int | Tensor
    """Index of the first query's own key among the keys of the mask."""
    first_key: int | Tensor = 0
    """Number of earlier keys that a sliding window has dropped."""
    padding: Tensor | None = None
    """(batch, 1): how many of those were padding."""


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """Return the smallest mask that expresses the visibility; registered with transformers. True = visible.

    >>> padding = torch.tensor([[False, True, True]])
    >>> key_mask(1, 3, 3, attention_mask=padding)
    tensor([[[[False,  True,  True]]]])
    >>> key_mask(1, 3, 3, attention_mask=padding, allow_is_causal_skip=False).shape
    torch.Size([1, 1, 3, 3])
    """
    # The offset is a tensor for a static cache, whose unused keys are at the end.
    at_the_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    plain = (allow_is_causal_skip and at_the_end) or allow_is_bidirectional_skip
    if not plain or (local_size is not None and kv_length >= local_size):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        table: Any = sdpa_mask(*sizes, mask_function, attention_mask, local_size, **options)
        if not torch.compiler.is_compiling():
            dropped = None if attention_mask is None else attention_mask[:, :kv_offset] == 0
            padding = None if dropped is None else dropped.sum(-1, keepdim=True)
            table.unsoft_shown = MaskedKeys(q_offset - kv_offset, kv_offset, padding)
        return table  # type: ignore[no-any-return]
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length]
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    return padding[:, None, None, :]


def visible(mask: Tensor) -> Tensor:
    """Return as bool which keys a bool or float mask lets a row see."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def token_positions(
    position_ids: Tensor | None,
    mask: Tensor | None,
    length: int,
    keys: int,
    *,
    causal: bool,
    cached: bool,
    label: str,
) -> tuple[Tensor, Tensor] | None:
    """Return positions of the queries (batch | 1, length) and of the keys (batch | 1, keys).

    None means the default: keys in order, the last ones aligned with the queries.

    >>> padding = torch.tensor([[[[False, False, True, True, True]]]])
    >>> token_positions(None, padding, 2, 5, causal=True, cached=True, label="mine")
    (tensor([[1, 2]]), tensor([[-1, -1,  0,  1,  2]]))
    """
    traced = torch.compiler.is_compiling()  # then code must not branch on values
    if not causal and length != keys:
        raise ValueError(
            f"swap: {label!r} uses positions, and the queries and keys of cross-attention have none in common"
        )
    if position_ids is not None and position_ids.dim() != 2:
        raise ValueError(
            f"swap: {label!r} uses positions, one number per token, and this model has"
            f" {tuple(position_ids.shape)}"
        )
    order = torch.arange(keys - length, keys, device=None if position_ids is None else position_ids.device)
    if mask is None and (position_ids is None or (not traced and bool((position_ids == order).all()))):
        return None
    real, own, first_key, ordinal = _key_order(mask, length, keys, order)
    expected, real_query = ordinal.gather(1, own), real.gather(1, own)
    if position_ids is None:
        return expected, ordinal
    # Numbers that count every token contain no information about padding.
    counts_padding = ((position_ids == own + first_key) | ~real_query).all(-1, keepdim=True)
    positions = torch.where(counts_padding, expected, position_ids)
    ahead = torch.where(real_query, positions - expected, torch.iinfo(torch.int64).min)
    shift = ahead.amax(-1, keepdim=True)
    consecutive = traced or bool(((ahead == shift) | ~real_query).all())
    if length == keys and (not consecutive or traced):
        if not traced and cached:
            raise ValueError(
                f"swap: {label!r} uses positions, and these position_ids are not consecutive; a cache keeps"
                " no positions of its keys. Pass use_cache=False, or the texts one by one or padded"
            )
        return positions, positions
    if not consecutive:
        raise ValueError(
            f"swap: {label!r} uses positions, and these position_ids are not consecutive, so that those of"
            " earlier keys are unknown"
        )
    shift = torch.where(real_query.any(-1, keepdim=True), shift, 0)
    return expected + shift, ordinal + shift


def _key_order(
    mask: Tensor | None, length: int, keys: int, order: Tensor
) -> tuple[Tensor, Tensor, int | Tensor, Tensor]:
    """Return which keys are not padding, the index of each query's own key, the number of keys before the
    first one of the mask, and for each key the number of real keys before it."""
    own, first_key, padding = order[None], 0, None
    if mask is None:
        real = torch.ones(1, keys, dtype=torch.bool, device=order.device)
    else:
        seen = visible(mask).any(1)
        real = seen.any(1)
        if shown := getattr(mask, "unsoft_shown", None):
            own = shown.first_query + torch.arange(length, device=order.device)[None]
            first_key, padding = shown.first_key, shown.padding
        elif seen.shape[1] > 1 and length < keys:  # every token sees itself, and nothing later
            own = keys - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
    before = real.cumsum(-1) - 1 + first_key
    return real, own.expand(len(real), length), first_key, before if padding is None else before - padding
