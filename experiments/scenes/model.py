"""The image-text model of the scenes: a LLaVA of transformers, four orders of magnitude smaller."""

from __future__ import annotations

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from experiments.scenes.captions import END, IMAGE, NUMBER, PAD, START, WORDS
from experiments.scenes.drawing import CELL, SIZE


def build_model(seed: int = 0) -> LlavaForConditionalGeneration:
    """Build an untrained CLIP vision tower of 2 layers, a projector, and a Llama of 3 layers.

    >>> sum(parameter.numel() for parameter in build_model().parameters()) < 500_000
    True
    """
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        image_size=SIZE,
        patch_size=CELL,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=64,
    )
    text = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=80,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        initializer_range=0.08,
        pad_token_id=NUMBER[PAD],
        bos_token_id=NUMBER[START],
        eos_token_id=NUMBER[END],
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=NUMBER[IMAGE],
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        projector_hidden_act="gelu",
    )
    return LlavaForConditionalGeneration(config)
