"""Decoding with the caches of mechanisms, through transformers' ``Cache``.

Linear attention and magnitude gates keep more than keys and values: for them a layer of the cache holds the
mechanism's own cache, hands the new keys on as they are, and marks them, so that the attention function finds
the cache they belong to. A mechanism that needs keys and values only works with every cache of transformers;
``generate`` on a CPU gives it buffers that its prepared decoding step writes into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from unsoft.hf.attention import NAME, Swapped
from unsoft.modules.cache import Cache, KeyValueCache


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
        return self._marked(key_states), value_states

    def _marked(self, keys: Tensor) -> Tensor:
        keys = keys.view_as(keys)  # a tensor of its own: the mark must not outlive this call
        keys.unsoft_layer = self  # type: ignore[attr-defined]
        return keys

    def cache_for(self, key: Tensor) -> Cache | None:
        """Return the mechanism's cache, to which the attention function appends these marked keys."""
        return self.cache

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
            problem = "a state cannot forget its last tokens; generate without an assistant model"
            raise NotImplementedError(problem)


class KeyValueLayer(StateLayer):
    """Keys and values of a mechanism that keeps nothing else, in the buffers of its prepared decoding step.

    The prompt gets all keys, as from transformers' own layer. A new token after it gets only its own key and
    the mark, if the prompt's mark has reached the attention function: some models change their keys after the
    cache, and go on with all keys.
    """

    is_croppable = True

    def __init__(self, attention: Swapped, dtype: str | None = None) -> None:
        """``dtype``: that of :class:`MechanismCache`."""
        super().__init__(attention)
        self.dtype_name = dtype
        self.is_initialized = True
        self._whole = self._mark_arrives = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if self.cache is not None and self.dtype_name is not None:
            self.cache.quantise(self.dtype_name)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        assert isinstance(self.cache, KeyValueCache)
        single = key_states.shape[-2] == 1 and self.cache.length > 0
        self._whole = not (single and self._mark_arrives) or torch.compiler.is_compiling()
        if not self._whole:
            return super().update(key_states, value_states)
        self.cache.append(key_states, value_states)
        self._promised = self.cache.length
        keys, values = self.cache.keys_and_values()
        return self._marked(keys), values

    def cache_for(self, key: Tensor) -> Cache | None:
        self._mark_arrives = True
        return None if self._whole else self.cache

    @property
    def keys(self) -> Tensor | None:
        """All keys so far, (batch, heads, length, width)."""
        return self.cache.keys_and_values()[0] if isinstance(self.cache, KeyValueCache) else None

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        """Ignored: the cache holds the keys."""

    @property
    def values(self) -> Tensor | None:
        """All values so far, (batch, heads, length, width)."""
        return self.cache.keys_and_values()[1] if isinstance(self.cache, KeyValueCache) else None

    @values.setter
    def values(self, values: Tensor | None) -> None:
        """Ignored: the cache holds the values."""

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop: expected a negative number of tokens to remove, not {tokens_to_remove}")
        if self.cache is not None:
            self.cache.length = self._promised = max(self.cache.length + tokens_to_remove, 0)


class MechanismCache(TransformersCache):
    """Cache of a swapped model: the mechanism's own cache where it has one, keys and values elsewhere.

    ``generate`` creates it automatically. With ``dtype="int8"`` it takes about a quarter of the memory of
    float32, and long texts are decoded faster (docs/hf.md); pass it to ``generate`` as
    ``past_key_values``. Mechanisms that keep more than keys and values do not support it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import unsoft
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8}
    >>> tiny = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    >>> model = unsoft.hf.swap(LlamaForCausalLM(tiny).eval(), "linear-elu1", layers=[1])
    >>> MechanismCache(model)
    MechanismCache(layers=[KeyValueLayer, StateLayer])
    >>> tiny = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    >>> model = unsoft.hf.swap(LlamaForCausalLM(tiny).eval(), "cog")
    >>> ids, cache = torch.tensor([[1, 2, 3]]), MechanismCache(model, dtype="int8")
    >>> model.generate(ids, attention_mask=ids > 0, max_new_tokens=4, past_key_values=cache).shape
    torch.Size([1, 7])
    """

    hands_on_new_keys = True
    """Mechanisms that compare keys get new ones only, and keep the earlier ones themselves."""

    def __init__(self, model: PreTrainedModel, dtype: str | None = None) -> None:
        layers = _decoder(model)
        if dtype is not None and not layers:
            raise ValueError(
                f"MechanismCache: argument 'dtype': {dtype!r} needs a decoder whose attention is swapped in"
                " every layer; use transformers' own caches"
            )
        super().__init__(layers=[_layer(model, attention, dtype) for attention in layers])

    @staticmethod
    def preferred(model: PreTrainedModel) -> bool:
        """Return True if a layer keeps a state of its own, or if every layer has a prepared decoding step."""
        layers = _decoder(model)
        steps = [attention.decodes_by_steps for attention in layers]
        state = any(attention.decodes_with_state for attention in layers)
        return state or (bool(steps) and all(steps) and _prepares_steps(model))


def _decoder(model: PreTrainedModel) -> list[Swapped]:
    """Return the swapped attention of each cache layer; empty where transformers' own caches are needed.

    Those are models whose cache has layers of other kinds too, or computes keys from what it stores (latent
    attention).
    """
    modules = [module for module in model.modules() if hasattr(module, NAME)]
    swapped = {getattr(module, "layer_idx", None): module for module in modules}
    if model.config.is_encoder_decoder or any(hasattr(module, "kv_lora_rank") for module in swapped.values()):
        return []
    layers = {number: getattr(module, NAME) for number, module in swapped.items() if number is not None}
    complete = sorted(layers) == list(range(model.config.get_text_config(decoder=True).num_hidden_layers))
    return [layers[number] for number in sorted(layers)] if complete else []


def _prepares_steps(model: PreTrainedModel) -> bool:
    """Return True on a CPU, where steps are compiled, unless layers read the keys of other layers."""
    shared = getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    return model.device.type == "cpu" and not shared


def _layer(model: PreTrainedModel, attention: Swapped, dtype: str | None) -> CacheLayerMixin:
    """Keys and values are kept whole also for sliding windows: layers of one kind share a mask and must be
    equally long."""
    if dtype is not None:
        attention.mechanism.new_cache(1).quantise(dtype)  # raises ValueError where that is unsupported
        if attention.windowed:
            problem = f"{dtype!r} does not support layers with a sliding window"
            raise ValueError(f"MechanismCache: argument 'dtype': {problem}")
        return KeyValueLayer(attention, dtype)
    if attention.decodes_with_state:
        return StateLayer(attention)
    steps = attention.decodes_by_steps and _prepares_steps(model)
    return KeyValueLayer(attention) if steps else DynamicLayer()
