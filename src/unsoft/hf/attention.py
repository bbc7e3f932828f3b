"""The attention function that transformers calls, and the module beside each attention module that it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils.output_capturing import _active_collector

from unsoft.hf.architecture import REFUSED
from unsoft.hf.masks import key_mask
from unsoft.mechanisms.cache import KeyValueCache
from unsoft.mechanisms.magnitude import Magnitude
from unsoft.mechanisms.module import Mechanism

NAME = "unsoft"
"""Of the attention implementation, of the submodule, and of the section in config.json."""


class Swapped(nn.Module):
    """A mechanism inside an attention module, with what it needs beyond the model's projections.

    Some mechanisms want several queries per head; the model makes one, so the others are a learned linear map of it, at first the
    identity. The buffer ``swapped`` makes every saved model name something that plain transformers does not expect, and says so.
    """

    def __init__(self, mechanism: Mechanism, label: str, softcap: float | None, window: int | None) -> None:
        super().__init__()
        self.mechanism, self.label, self.softcap = mechanism, label, softcap
        place, kept = mechanism.place, mechanism.new_cache(1)
        self.stateful = not isinstance(kept, KeyValueCache)
        by_rows = window is not None  # a mask for each row, which a state of fixed size cannot honour
        keeps_keys = isinstance(getattr(kept, "inner", kept), KeyValueCache)
        self.decodes_with_state = self.stateful and (keeps_keys or not by_rows)
        more = mechanism.query_heads // place.heads - 1
        identity = torch.eye(place.head_dim).expand(place.heads, more, -1, -1)
        self.more_queries = nn.Parameter(identity.clone()) if more else None
        self.register_buffer(NAME, torch.tensor(1))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None,
        dropout: float, window: int | None, return_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Output (batch, heads, queries, width), and weights if asked for."""
        if self.mechanism.causal_only and not causal:
            raise ValueError(f"swap: {self.label!r} looks back only, and this attention looks both ways")
        if self.more_queries is not None:
            query = self._with_more_queries(query)
        cache = None if torch.compiler.is_compiling() else getattr(key, "unsoft_cache", None)
        if cache is None:
            mask, is_causal = self._visibility(mask, causal, query.shape[-2], key, window)
        else:
            is_causal = True
        result = self.mechanism(
            query, key, value, mask, dropout, is_causal, scale, query.shape[1] != key.shape[1],
            return_weights=return_weights, cache=cache,
        )  # fmt: skip
        return result if return_weights else (result, None)

    def _with_more_queries(self, query: Tensor) -> Tensor:
        """The further queries of a head stand right after its first."""
        more = torch.einsum("bhld,hmde->bhmle", query, self.more_queries.to(query.dtype))
        return torch.cat([query[:, :, None], more], dim=2).flatten(1, 2)

    def _visibility(
        self, mask: Tensor | None, causal: bool, length: int, key: Tensor, window: int | None
    ) -> tuple[Tensor | None, bool | str]:
        """The mask and the causal rule of a call without a state."""
        if self.stateful:
            self._check(mask, causal, length, key, window)
            return mask, "lower_right" if causal else False
        # A mask for every row has causality in it; a single row sees everything before it.
        causal = causal and length > 1 and (mask is None or mask.shape[-2] == 1)
        return mask, "lower_right" if causal else False

    def _check(self, mask: Tensor | None, causal: bool, length: int, key: Tensor, window: int | None) -> None:
        """ValueError where positions of keys are not what a mechanism with a state takes them for."""
        keys = key.shape[-2]
        cropped = window is not None and window <= keys and length < keys
        if cropped and any(isinstance(part, Magnitude) for part in self.mechanism.modules()):
            raise ValueError(
                f"swap: {self.label!r} needs all keys, and this cache keeps those of a sliding window; use generate(), or"
                " past_key_values=unsoft.hf.MechanismCache(model)"
            )
        if mask is None or not causal or torch.compiler.is_compiling():
            return
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        if length < keys and not bool(seen[..., -1].any()):
            raise ValueError(
                f"swap: {self.label!r} depends on positions, which a static cache does not tell; use the default cache"
            )
        if seen.shape[-2] > 1 and bool(seen.triu(keys - length + 1).any()):
            raise ValueError(
                f"swap: {self.label!r} needs to know which keys come later, and this mask lets tokens see some of them"
            )


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None, softcap: float | None = None,
    sliding_window: int | None = None, output_attentions: bool = False, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The function of transformers' attention interface; output as (batch, queries, heads, width)."""
    swapped = getattr(module, NAME, None)
    if swapped is None:
        raise RuntimeError(
            f"this {type(module).__name__} has no mechanism: a model that was saved after unsoft.hf.swap must be loaded with"
            " unsoft.hf.load(path)"
        )
    for word, meaning in REFUSED.items():
        if options.get(word) is not None:
            raise ValueError(f"swap: {type(module).__name__} {meaning} ({word}), which no mechanism carries")
    if softcap != swapped.softcap:
        raise ValueError(
            f"swap: {type(module).__name__} caps its logits at {softcap}, but was swapped with {swapped.softcap}; swap again"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True) and getattr(module.config, "is_causal", True)
    out, weights = swapped(
        query, key, value, attention_mask, causal=bool(is_causal), scale=scaling, dropout=dropout,
        window=sliding_window, return_weights=output_attentions or _weights_wanted(),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), weights


def _weights_wanted() -> bool:
    """Was the model called with output_attentions=True? Not every architecture passes that on."""
    if torch.compiler.is_compiling():
        return False
    return "attentions" in (_active_collector.get() or {})


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, key_mask)
