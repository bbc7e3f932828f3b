"""Masks and positions of a swapped model's tokens.

transformers requests one mask per forward pass. Plain causal or full attention needs none, or with padding
one bool per key (batch, 1, 1, keys); causality is a property of the attention module. Mechanisms that use all
keys together then see which keys exist, and kernels skip masked keys. Sliding windows and packed texts are
described by a :class:`Visibility`, a few numbers per token. Static caches, traced code and every other
pattern get the whole table (batch, 1, queries, keys).

Positions, the symbols i and j of a formula, are the model's ``position_ids``. Padding does not count: if a
model numbers padding too, the tokens of each text are numbered from 0 instead, as ``generate`` does. A cache
holds keys without their positions, so earlier keys are assumed to precede the new ones without a gap;
positions with gaps raise ValueError where a cache would lose them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getclosurevars
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)


@dataclass(frozen=True)
class MaskedKeys:
    """The keys that a mask covers, where its shape does not determine them.

    Attached to a table as ``unsoft_shown``.
    """

    first_query: int | Tensor
    """Index of the first query's own key among the keys of the mask."""
    first_key: int | Tensor = 0
    """Number of earlier keys that a sliding window has dropped."""
    padding: Tensor | None = None
    """(batch, 1): how many of those were padding."""


Window = tuple[int | None, int | None]


class MaskPattern(NamedTuple):
    """The keys that a mask function of transformers shows, without padding."""

    causal: bool = False
    window: Window | None = None
    """Positions to the left and right of the row's own; None = no limit."""
    documents: Tensor | None = None
    """(batch, length): the number of each token's text in a packed row."""


_CODE = {
    and_masks(causal_mask_function).__code__: "and",
    sliding_window_overlay(1).__code__: "window",
    sliding_window_bidirectional_overlay(1).__code__: "window both ways",
    packed_sequence_mask_function(torch.zeros(1, 1)).__code__: "documents",
}
"""Mask functions of transformers are closures: their code identifies them, their variables are the sizes."""


def pattern_of(function: Callable[..., Any]) -> MaskPattern | None:
    """Return the pattern of a mask function, None if a window and documents do not describe it.

    >>> pattern_of(and_masks(sliding_window_overlay(4), causal_mask_function))
    MaskPattern(causal=True, window=(3, 0), documents=None)
    """
    if function is causal_mask_function:
        return MaskPattern(causal=True)
    if function is bidirectional_mask_function:
        return MaskPattern()
    kind = _CODE.get(getattr(function, "__code__", None))  # type: ignore[arg-type]
    if kind is None:
        return None
    variables = getclosurevars(function).nonlocals
    if kind == "documents":
        return MaskPattern(documents=variables["packed_sequence_mask"])
    if kind == "window":
        return MaskPattern(window=(variables["sliding_window"] - 1, None))
    if kind == "window both ways":
        return MaskPattern(window=(variables["sliding_window"],) * 2)
    parts = [pattern_of(part) for part in variables["mask_functions"]]
    return _joined([part for part in parts if part is not None]) if None not in parts else None


def _joined(parts: list[MaskPattern]) -> MaskPattern | None:
    """Return the intersection of patterns with at most one window and one packing, None if there are more."""
    causal = any(part.causal for part in parts)
    windows = [part.window for part in parts if part.window is not None]
    packings = [part.documents for part in parts if part.documents is not None]
    if len(windows) > 1 or len(packings) > 1:
        return None
    window = windows[0] if windows else None
    if window is not None and causal:
        window = (window[0], 0)
    return MaskPattern(causal, window, packings[0] if packings else None)


@dataclass(frozen=True)
class Visibility:
    """The visibility of a windowed or packed call, in place of the mask that transformers would build.

    Not a tensor, so that a model that computes with its mask fails instead of losing a part of it.
    """

    queries: int
    keys: int
    causal: bool
    window: Window | None
    documents: Tensor | None
    """(batch | 1, tokens), where queries and keys are the same tokens."""
    padding: Tensor | None
    """(batch, 1, 1, keys): True for keys that are not padding."""
    shown: MaskedKeys
    device: Any

    @property
    def structure(self) -> dict[str, Any]:
        """Window and documents as keywords of ``attention``, without those that there are not."""
        named = {"window": self.window, "documents": self.documents}
        return {name: x for name, x in named.items() if x is not None}

    def contiguous(self) -> Tensor:
        """Return the mask: ``generate`` builds masks for static caches ahead, and tensors only."""
        return self.table()

    def table(self, *, documents: bool = True) -> Tensor:
        """Return the mask (batch | 1, 1, queries, keys), on request without documents."""
        j = torch.arange(self.keys, device=self.device)
        i = j[self.keys - self.queries :, None]
        left, right = self.window or (None, None)
        seen = torch.ones(self.queries, self.keys, dtype=torch.bool, device=self.device)
        if left is not None:
            seen = seen & (j >= i - left)
        if self.causal:
            seen = seen & (j <= i)
        elif right is not None:
            seen = seen & (j <= i + right)
        seen = seen[None, None]
        if self.padding is not None:
            seen = seen & self.padding
        if documents and self.documents is not None:
            seen = seen & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
        seen.unsoft_shown = self.shown  # type: ignore[attr-defined]
        return seen


def visibility_of(
    queries: int, keys: int, first_key: int, pattern: MaskPattern, padding: Tensor | None, device: Any
) -> Visibility | Tensor | None:
    """Return the visibility of queries that are the last of the keys, as a mask of keys or None if possible.

    ``padding`` is (batch, tokens so far), True for tokens that are not padding.
    """
    dropped = None if padding is None else (padding[:, :first_key] == 0).sum(-1, keepdim=True)
    real = None if padding is None else padding[:, None, None, first_key : first_key + keys]
    if real is not None and bool(real.all()):
        real = None
    window, documents = pattern.window, pattern.documents
    if window is not None:
        sides = window[:1] if pattern.causal else window
        if all(side is None or side >= keys - 1 for side in sides):
            window = None  # every row sees all keys that it could see without it
    if documents is not None:
        # The rows of a batch share one packing if position_ids had one row.
        documents = documents[:1] if bool((documents == documents[:1]).all()) else documents
    if window is None and documents is None and first_key == 0:
        return real
    shown = MaskedKeys(keys - queries, first_key, dropped)
    return Visibility(queries, keys, pattern.causal, window, documents, real, shown, device)


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
) -> Visibility | Tensor | None:
    """Return the smallest mask that expresses the visibility; registered with transformers. True = visible.

    >>> padding = torch.tensor([[False, True, True]])
    >>> key_mask(1, 3, 3, attention_mask=padding)
    tensor([[[[False,  True,  True]]]])
    >>> key_mask(1, 3, 3, attention_mask=padding, allow_is_causal_skip=False).shape
    torch.Size([1, 1, 3, 3])
    """
    # The offset is a tensor for a static cache, whose unused keys are at the end.
    at_the_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    pattern = pattern_of(mask_function) if at_the_end and not torch.compiler.is_compiling() else None
    if pattern is not None:
        # transformers never allows skipping the mask of a packed row, since a mask is all it has for one.
        allowed = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
        if allowed or (pattern.documents is not None and pattern.causal):
            padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
            device = options.get("device", "cpu")
            return visibility_of(q_length, kv_length, kv_offset, pattern, padding, device)
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
    shown: MaskedKeys | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return positions of the queries (batch | 1, length) and of the keys (batch | 1, keys).

    None means the default: keys in order, the last ones aligned with the queries. ``shown`` is that of a
    :class:`Visibility`, of which ``mask`` is the part for keys.

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
    plain = mask is None and (shown is None or shown.first_key == 0)
    if plain and (position_ids is None or (not traced and bool((position_ids == order).all()))):
        return None
    shown = getattr(mask, "unsoft_shown", shown)
    real, own, first_key, ordinal = _key_order(mask, length, keys, order, shown)
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
    mask: Tensor | None, length: int, keys: int, order: Tensor, shown: MaskedKeys | None
) -> tuple[Tensor, Tensor, int | Tensor, Tensor]:
    """Return which keys are not padding, the index of each query's own key, the number of keys before the
    first one of the mask, and for each key the number of real keys before it."""
    own, padding = order[None], None
    first_key: int | Tensor = 0
    if mask is None:
        real = torch.ones(1, keys, dtype=torch.bool, device=order.device)
    else:
        seen = visible(mask).any(1)
        real = seen.any(1)
        if shown is None and seen.shape[1] > 1 and length < keys:  # every token sees itself, nothing later
            own = keys - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
    if shown is not None:
        own = shown.first_query + torch.arange(length, device=order.device)[None]
        first_key, padding = shown.first_key, shown.padding
    before = real.cumsum(-1) - 1 + first_key
    if padding is not None:
        before = before - padding
    return real.expand(len(before), keys), own.expand(len(before), length), first_key, before
