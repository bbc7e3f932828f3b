"""The picture in a model's arguments: where its visual tokens are, and the same picture masked, or noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Inputs = Mapping[str, Any]
"""One example as a processor makes it: ``input_ids`` (1, tokens), ``pixel_values``, and the like."""


def visual_columns(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """The positions of the visual tokens; ValueError if there is no picture."""
    token = getattr(model.config, "image_token_id", None)
    if token is None or "pixel_values" not in inputs or "input_ids" not in inputs:
        lacks = "a picture (pixel_values)" if token is not None else "an image token in its config"
        raise ValueError(f"steer: {type(model).__name__} needs image and text here, and there is not {lacks}")
    ids = inputs["input_ids"]
    if ids.dim() != 2 or len(ids) != 1:
        raise ValueError(
            f"steer: one example at a time: input_ids must be (1, tokens), not {tuple(ids.shape)}"
        )
    found: Tensor = (ids[0] == token).nonzero()[:, 0]
    if len(found) == 0:
        raise ValueError(f"steer: input_ids hold no image token ({token}), so the picture is not looked at")
    return found


def visual_grid(model: PreTrainedModel, inputs: Inputs) -> tuple[int, int]:
    """Rows and columns of the visual tokens, which cover the picture evenly."""
    count = len(visual_columns(model, inputs))
    if "image_grid_thw" in inputs:
        sizes = inputs["image_grid_thw"]
        merged = model.config.vision_config.spatial_merge_size
        if len(sizes) != 1 or int(sizes[0, 0]) != 1:
            raise ValueError("steer: one picture for each example, and no video")
        rows, columns = (int(size) // merged for size in sizes[0, 1:])
    else:
        rows = columns = round(count**0.5)
    if rows * columns != count or inputs["pixel_values"].dim() not in (2, 4):
        raise ValueError(
            f"steer: {count} visual tokens are no grid over one picture with pixel_values"
            f" {tuple(inputs['pixel_values'].shape)}; models that cut pictures into tiles are not supported"
        )
    return rows, columns


def masked(model: PreTrainedModel, inputs: Inputs, hidden: Tensor) -> dict[str, Any]:
    """The same with the regions of some visual tokens (bool, for each) painted in its mean colour."""
    rows, columns = visual_grid(model, inputs)
    pixels = inputs["pixel_values"]
    if pixels.dim() == 4:
        cells = hidden.view(1, 1, rows, columns).to(pixels.dtype)
        where = torch.nn.functional.interpolate(cells, pixels.shape[-2:]) > 0.5
        changed = torch.where(where, pixels.mean((-2, -1), keepdim=True), pixels)
    else:  # patches in rows, those of one token together
        where = hidden.repeat_interleave(len(pixels) // len(hidden))[:, None]
        changed = torch.where(where, pixels.mean(0, keepdim=True), pixels)
    return {**inputs, "pixel_values": changed}


def noise(inputs: Inputs, seed: int) -> dict[str, Any]:
    """The same with a picture of noise, that has the mean and spread of the picture's channels."""
    pixels = inputs["pixel_values"]
    over = (-2, -1) if pixels.dim() == 4 else 0
    mean, spread = pixels.mean(over, keepdim=True), pixels.std(over, keepdim=True)
    drawn = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed)).to(pixels)
    return {**inputs, "pixel_values": mean + spread * drawn}


def with_caption(model: PreTrainedModel, inputs: Inputs, caption: Tensor) -> dict[str, Any]:
    """The arguments of one forward pass over prompt and caption (tokens,)."""
    ids = inputs["input_ids"]
    if len(caption) == 0 or bool((caption == model.config.image_token_id).any()):
        raise ValueError("steer: a caption must have at least one token, and no image token")
    suffix = int(model.config.model_type == "paligemma")  # which looks both ways in what is marked with 0
    added = {"input_ids": caption, "attention_mask": torch.ones_like(caption)}
    found = dict(inputs)
    found.setdefault("attention_mask", torch.ones_like(ids))
    for name, value in found.items():
        if isinstance(value, Tensor) and value.shape == ids.shape and not value.is_floating_point():
            more = added.get(name, torch.full_like(caption, suffix if name == "token_type_ids" else 0))
            found[name] = torch.cat([value, more[None].to(value)], 1)
    return found
