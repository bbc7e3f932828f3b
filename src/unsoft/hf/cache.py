"""Decoding with mechanisms that have their own cache, through transformers' ``Cache``.

A mechanism that needs only keys and values works with every cache of transformers. Linear attention and
magnitude gates store something else. For them a layer of the cache holds the mechanism's own cache, returns
the new keys unchanged, and marks them, so that the attention function finds the cache they belong to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from unsoft.hf.attention import NAME, Swapped
from unsoft.modules.cache import Cache


class StateLayer(CacheLayerMixin):
    """Layer of a transformers cache that holds a mechanism's own cache."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, attention: Swapped) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = attention
        self.cache: Cache | None = None
        self._promised = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.cache = self.attention.mechanism.new_cache(len(key_states))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        taken = self.get_seq_length()
        if taken != self._promised:
            raise RuntimeError(
                f"{self._promised} tokens were handed to this cache, and attention took {taken} of them: the"
                " model changes its keys after the cache, or a forward pass was interrupted; generate with"
                " use_cache=False, or start with a new cache"
            )
        self._promised += key_states.shape[-2]
        key_states = key_states.view_as(key_states)  # a new tensor: the mark must not outlive this call
        key_states.unsoft_cache = self.cache  # type: ignore[attr-defined]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.cache is None else self.cache.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.cache, self._promised = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(torch.arange(self.cache.batch, device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self.cache.reorder(torch.arange(self.cache.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise NotImplementedError(
                "a state cannot forget its last tokens; generate without an assistant model"
            )


class MechanismCache(TransformersCache):
    """Cache of a swapped model: the mechanism's own cache where it has one, keys and values elsewhere.

    ``generate`` creates it automatically.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import unsoft
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8}
    >>> tiny = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    >>> model = unsoft.hf.swap(LlamaForCausalLM(tiny).eval(), "linear-elu1", layers=[1])
    >>> MechanismCache(model)
    MechanismCache(layers=[DynamicLayer, StateLayer])
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(layers=[_layer(attention) for attention in _decoder(model)])

    @staticmethod
    def needed(model: PreTrainedModel) -> bool:
        """Return True if any layer of the decoder has a cache of its own kind."""
        return any(attention.decodes_with_state for attention in _decoder(model))


def _decoder(model: PreTrainedModel) -> list[Swapped]:
    """Return the swapped attention of each cache layer; empty where transformers' own caches are needed.

    Those are models whose cache has layers of other kinds too, or computes keys from what it stores (latent
    attention).
    """
    swapped = {
        getattr(module, "layer_idx", None): module for module in model.modules() if hasattr(module, NAME)
    }
    if model.config.is_encoder_decoder or any(hasattr(module, "kv_lora_rank") for module in swapped.values()):
        return []
    layers = {number: getattr(module, NAME) for number, module in swapped.items() if number is not None}
    complete = sorted(layers) == list(range(model.config.get_text_config(decoder=True).num_hidden_layers))
    return [layers[number] for number in sorted(layers)] if complete else []


def _layer(attention: Swapped) -> CacheLayerMixin:
    """Return a cache layer. Sliding windows keep all keys, since layers of one kind share a mask and must
    have equal lengths."""
    return StateLayer(attention) if attention.decodes_with_state else DynamicLayer()
