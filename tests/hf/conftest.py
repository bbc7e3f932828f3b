"""Tiny random models of ten architectures, with weights so large that attention matters,
and what they are called with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

_SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 50,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 12,
    "patch_size": 4,
    "initializer_range": 0.3,
}
_ROTARY = {"num_key_value_heads": 2, "head_dim": 8}
_KINDS = {
    "llama": ("LlamaForCausalLM", _SIZE | _ROTARY),
    "gpt2": ("GPT2LMHeadModel", _SIZE),
    "gpt_neox": ("GPTNeoXForCausalLM", _SIZE),
    "mistral": ("MistralForCausalLM", _SIZE | _ROTARY | {"sliding_window": 4}),
    "qwen3": ("Qwen3ForCausalLM", _SIZE | _ROTARY),
    # a cap of 1 bends nearly every logit; one of the layers has a window
    "gemma2": (
        "Gemma2ForCausalLM",
        _SIZE | _ROTARY | {"attn_logit_softcapping": 1.0, "sliding_window": 4, "query_pre_attn_scalar": 8},
    ),
    # every layer has a window; Gemma's own layers alternate
    "gemma3": (
        "Gemma3ForCausalLM",
        _SIZE | _ROTARY | {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
    ),
    "opt": ("OPTForCausalLM", _SIZE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "bert": ("BertForMaskedLM", _SIZE),
    "vit": ("ViTForImageClassification", _VISION | {"num_labels": 5}),
    "clip": (
        "CLIPModel",
        {
            "text_config": _SIZE | {"projection_dim": 16},
            "vision_config": _VISION | {"projection_dim": 16},
            "projection_dim": 16,
        },
    ),
}


@pytest.fixture
def tiny() -> Callable[[str], PreTrainedModel]:
    """A model for inference in float32 with eager attention; the same weights every time."""

    def tiny(name: str, **settings: object) -> PreTrainedModel:
        torch.manual_seed(0)
        kind = getattr(transformers, _KINDS[name][0])
        config = kind.config_class(**_KINDS[name][1] | settings)
        config._attn_implementation = "eager"
        return kind(config).eval()

    return tiny


@pytest.fixture
def words() -> Tensor:
    """Token ids (2, 9) without special ones."""
    return torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def padded(words) -> Callable[..., dict[str, Tensor]]:
    """The batch of words, of which the second text is three tokens shorter if there is a side to pad."""

    def padded(side: str | None, padding: int = 0) -> dict[str, Tensor]:
        hidden = {"left": slice(0, 3), "right": slice(6, 9), None: slice(0, 0)}[side]
        ids, mask = words.clone(), torch.ones_like(words)
        mask[1, hidden] = 0
        ids[1, hidden] = padding
        return {"input_ids": ids, "attention_mask": mask}

    return padded


@pytest.fixture
def numbers(padded) -> Callable[..., Tensor]:
    """What a model makes of the padded batch or of two images: the outputs of everything that is not
    padding."""

    @torch.no_grad()
    def numbers(name: str, model: PreTrainedModel, side: str | None) -> Tensor:
        image = {"pixel_values": torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))}
        if name == "vit":
            return model(**image).logits
        batch = padded(side)
        real = batch["attention_mask"].bool()
        if name != "clip":
            return model(**batch).logits[real]
        batch["input_ids"][:, 4] = 2  # it pools at the end-of-text token
        result = model(**batch, **image)
        return torch.cat(
            [result.logits_per_image.flatten(), result.text_model_output.last_hidden_state[real].flatten()]
        )

    return numbers
