"""Where the tokens of a swapped model stand: the symbols i and j of a formula, and what distances are checked
against.

Positions are the model's own ``position_ids``. Padding does not count: where a model was not told of it and
simply numbers all tokens, the tokens of each text are numbered from 0 instead, as ``generate`` does. A cache
holds keys and not their positions, so earlier keys are taken to stand right before the new ones; positions
with gaps are refused where a cache would lose them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shown:
    """Which keys a mask is about, where its own shape does not tell; attached to the mask as
    ``unsoft_shown``."""

    first_query: int | Tensor
    """Number of the first query's own key among the keys shown."""
    first_key: int | Tensor = 0
    """How many keys a sliding window has dropped before the first one shown."""
    padding: Tensor | None = None
    """(batch, 1): how many of those were padding."""


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
    """Positions of the queries (batch | 1, length) and of the keys (batch | 1, keys); None: simply in order,
    the last ones aligned.

    >>> padding = torch.tensor([[[[False, False, True, True, True]]]])
    >>> token_positions(None, padding, 2, 5, causal=True, cached=True, label="mine")
    (tensor([[1, 2]]), tensor([[-1, -1,  0,  1,  2]]))
    """
    traced = torch.compiler.is_compiling()  # then values cannot be asked for
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
    real, own, first_key, ordinal = _order(mask, length, keys, order)
    expected, there = ordinal.gather(1, own), real.gather(1, own)
    if position_ids is None:
        return expected, ordinal
    # Numbers that count every token say nothing about padding.
    counted = ((position_ids == own + first_key) | ~there).all(-1, keepdim=True)
    given = torch.where(counted, expected, position_ids)
    ahead = torch.where(there, given - expected, torch.iinfo(torch.int64).min)
    shift = ahead.amax(-1, keepdim=True)
    consecutive = traced or bool(((ahead == shift) | ~there).all())
    if length == keys and (not consecutive or traced):
        if not traced and cached:
            raise ValueError(
                f"swap: {label!r} uses positions, and these position_ids are not consecutive: a cache would"
                " not tell where its keys stand; pass use_cache=False"
            )
        return given, given
    if not consecutive:
        raise ValueError(
            f"swap: {label!r} uses positions, and these position_ids are not consecutive, so that those of"
            " earlier keys are unknown"
        )
    shift = torch.where(there.any(-1, keepdim=True), shift, 0)
    return expected + shift, ordinal + shift


def _order(
    mask: Tensor | None, length: int, keys: int, order: Tensor
) -> tuple[Tensor, Tensor, int | Tensor, Tensor]:
    """From a mask: which keys are there, the number of each query's own key, how many keys came before the
    first one shown, and how many that are there came before each key."""
    own, first_key, padding = order[None], 0, None
    if mask is None:
        real = torch.ones(1, keys, dtype=torch.bool, device=order.device)
    else:
        seen = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min).any(1)
        real = seen.any(1)
        if shown := getattr(mask, "unsoft_shown", None):
            own = shown.first_query + torch.arange(length, device=order.device)[None]
            first_key, padding = shown.first_key, shown.padding
        elif seen.shape[1] > 1 and length < keys:  # every token sees itself, and nothing later
            own = keys - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
    before = real.cumsum(-1) - 1 + first_key
    return real, own.expand(len(real), length), first_key, before if padding is None else before - padding
