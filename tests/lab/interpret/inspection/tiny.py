"""Tiny random models of many architectures, and something for them to read."""

import torch
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTModel,
)

WORDS = 60
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
NARROW = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}

BUILD = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=6)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **GROUPED, attn_logit_softcapping=0.5, query_pre_attn_scalar=2, attn_implementation="eager"
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=WORDS,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    ),
    "bert": lambda: BertModel(BertConfig(**SIZES, max_position_embeddings=64)),
    "vit": lambda: ViTModel(ViTConfig(**NARROW, image_size=16, patch_size=4)),
    "clip": lambda: CLIPModel(
        CLIPConfig(
            text_config=NARROW | {"vocab_size": WORDS, "max_position_embeddings": 32},
            vision_config=NARROW | {"image_size": 16, "patch_size": 4},
            projection_dim=16,
        )
    ),
}
TEXT = [name for name in BUILD if name not in ("vit", "clip")]
CAUSAL = [name for name in TEXT if name != "bert"]


def tiny(name: str, sharpness: float = 4.0):
    """A model whose heads differ: with the usual small initial weights all attention would be flat."""
    torch.manual_seed(7)
    model = BUILD[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(sharpness)
    return model


def reading(name: str, padded: str = "") -> dict:
    """Inputs for a model; the second of three sequences is shorter, padded on the left or right."""
    generator = torch.Generator().manual_seed(3)
    inputs = {}
    if name != "vit":
        inputs["input_ids"] = torch.randint(3, WORDS, (3, 14), generator=generator)
        inputs["input_ids"][0, 4:8] = 9  # a crowd
        inputs["attention_mask"] = torch.ones(3, 14, dtype=torch.long)
        if padded:
            inputs["attention_mask"][1, slice(0, 5) if padded == "left" else slice(9, 14)] = 0
        if (
            name in ("gpt2", "bert") and padded == "left"
        ):  # they count positions from the start of the padding
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    if name in ("vit", "clip"):
        inputs["pixel_values"] = torch.randn(3, 3, 16, 16, generator=generator)
    return inputs
