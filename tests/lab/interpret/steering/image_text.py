"""Tiny random image-text models of four families, and an example for each."""

from __future__ import annotations

import torch
import transformers

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
IMAGE = 5
ROTARY = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
QWEN_VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "mlp_ratio": 2,
}
MODELS = {
    "llava": ("LlavaForConditionalGeneration", "llama", VISION | {"model_type": "clip_vision_model"}, {}),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "gemma",
        VISION | {"model_type": "siglip_vision_model"},
        {"projection_dim": 32},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        VISION | {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "boi_token_index": 6, "eoi_token_index": 7},
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "",
        QWEN_VISION,
        {"video_token_id": 8, "vision_start_token_id": 6, "vision_end_token_id": 7},
    ),
}
GRIDS = {"llava": (4, 4), "paligemma": (4, 4), "gemma3": (2, 2), "qwen2_vl": (2, 2)}


def image_text(name):
    """A model for inference and what it is given: one picture and a prompt."""
    kind, language, vision, settings = MODELS[name]
    text = TEXT | ({"model_type": language} if language else {"rope_parameters": ROTARY})
    if "gemma" in language:
        text = text | {"head_dim": 8}
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    token = "image_token_id" if name == "qwen2_vl" else "image_token_index"
    config = model_class.config_class(text_config=text, vision_config=vision, **{token: IMAGE}, **settings)
    model = model_class(config).eval()
    if name == "gemma3":  # starts with zeros, so that the picture would not be seen
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    rows, columns = GRIDS[name]
    ids = torch.tensor([[1, 6, *[IMAGE] * rows * columns, 7, 10, 11]])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}
    picture = (ids == IMAGE).int()
    if name == "qwen2_vl":
        inputs["pixel_values"] = torch.randn(16, 48)
        inputs |= {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": picture}
    if name == "gemma3":
        inputs["token_type_ids"] = picture
    if name == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return model, inputs


def written(model, inputs, count=4):
    """A caption (tokens,) that the model writes without chance, and its logits (tokens, words)."""
    done = model.generate(
        **inputs,
        attention_mask=torch.ones_like(inputs["input_ids"]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=[IMAGE, 8],  # no pictures or videos in captions
        return_dict_in_generate=True,
        output_logits=True,
    )
    return done.sequences[0, inputs["input_ids"].shape[1] :], torch.cat(done.logits)
