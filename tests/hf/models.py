"""Tiny random models of ten architectures, wide enough in their weights that attention matters."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

_SIZE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50,
    "initializer_range": 0.3, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 12,
    "patch_size": 4, "initializer_range": 0.3,
}  # fmt: skip
_ROTARY = {"num_key_value_heads": 2, "head_dim": 8}

CAUSAL = {
    "llama": ("LlamaForCausalLM", _SIZE | _ROTARY),
    "gpt2": ("GPT2LMHeadModel", _SIZE),
    "gpt_neox": ("GPTNeoXForCausalLM", _SIZE),
    "mistral": ("MistralForCausalLM", _SIZE | _ROTARY | {"sliding_window": 4}),
    "qwen3": ("Qwen3ForCausalLM", _SIZE | _ROTARY),
    # a cap of 1 bends nearly every logit; one of the layers has a window
    "gemma2": ("Gemma2ForCausalLM", _SIZE | _ROTARY | {"attn_logit_softcapping": 1.0, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "opt": ("OPTForCausalLM", _SIZE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, "do_layer_norm_before": True}),
}  # fmt: skip
TEXT = CAUSAL | {"bert": ("BertForMaskedLM", _SIZE)}
ALL = [*TEXT, "vit", "clip"]


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """A model for inference, in float32, with eager attention."""
    torch.manual_seed(seed)
    if name == "vit":
        return _made("ViTForImageClassification", _VISION | {"num_labels": 5})
    if name == "clip":
        text = _SIZE | {"projection_dim": 16}
        return _made("CLIPModel", {"text_config": text, "vision_config": _VISION | {"projection_dim": 16}, "projection_dim": 16})
    return _made(*TEXT[name])


def _made(kind: str, settings: dict) -> PreTrainedModel:
    kind = getattr(transformers, kind)
    config = kind.config_class(**settings)
    config._attn_implementation = "eager"
    return kind(config).eval()


def words(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Token ids without special ones."""
    return torch.randint(3, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(side: str | None, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The ids, of which the second text is three shorter if it is padded on a ``side``."""
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :3] = 0
    elif side == "right":
        mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def inputs(name: str, side: str | None = None) -> dict[str, torch.Tensor]:
    """What a model is called with."""
    image = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    if name == "vit":
        return {"pixel_values": image}
    batch = padded(side, words())
    if name == "clip":
        batch["input_ids"][:, 4] = 2  # it pools at the end-of-text token
    return batch | {"pixel_values": image} if name == "clip" else batch


def outputs(name: str, result: object, mask: torch.Tensor | None) -> torch.Tensor:
    """The numbers that count: logits of real tokens, or all of them for images."""
    if name == "vit":
        return result.logits
    if name == "clip":
        return torch.cat([result.logits_per_image.flatten(), result.text_model_output.last_hidden_state[mask.bool()].flatten()])
    return result.logits[mask.bool()]
