"""The attention modules of a transformers model: where they are, how wide, and whether they can be swapped
faithfully.

A module can be swapped if its ``forward`` hands queries, keys and values to transformers' attention
interface. What else it hands over must be something that a mechanism carries; what changes the logits in a
way that no mechanism knows is refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from unsoft.modules.spec import LayerSpec

REFUSED = {
    "s_aux": "has attention sinks: a learned logit in the normaliser",
    "position_bias": "adds a position bias to its logits",
    "indices": "attends to a choice of keys that it makes itself",
    "block_indices": "attends to a choice of keys that it makes itself",
}
"""Keywords of the interface that mechanisms do not carry, and what they mean."""
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_WIDTH = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")


@dataclass(frozen=True)
class Found:
    """An attention module, its name in the model, and its sizes."""

    name: str
    module: nn.Module
    layer_spec: LayerSpec
    causal: bool | None
    """Does it look back only? None: its model says so in every call."""


def attention_modules(model: PreTrainedModel) -> list[Found]:
    """Every module of a model that goes through the attention interface, in order; ValueError if one cannot
    be swapped."""
    named = [(name, module) for name, module in model.named_modules() if _goes_through(module)]
    if not named:
        raise ValueError(
            f"swap: {type(model).__name__} cannot be swapped: its attention does not go through"
            " transformers' attention interface"
        )
    for _, module in named:
        if reason := refusal(type(module)):
            raise ValueError(
                f"swap: {type(model).__name__} cannot be swapped faithfully: {type(module).__name__}"
                f" {reason}, which no mechanism carries"
            )
    places = _positions([name for name, _ in named])
    return [
        Found(name, module, _layer_spec(module, layer, layers), _causal(model, name))
        for (name, module), (layer, layers) in zip(named, places, strict=True)
    ]


def refusal(kind: type[nn.Module]) -> str | None:
    """Why an attention class cannot be swapped, in words; None if it can.

    >>> from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
    >>> refusal(GptOssAttention)
    'has attention sinks: a learned logit in the normaliser (s_aux)'
    """
    texts = set(_texts(_code(kind)))
    return next((f"{meaning} ({word})" for word, meaning in REFUSED.items() if word in texts), None)


def has_window(module: nn.Module) -> bool:
    """May the module see less than all keys before it: a sliding window, or chunks?"""
    config = getattr(module, "config", None)
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return window is not None or getattr(config, "attention_chunk_size", None) is not None


def _causal(model: PreTrainedModel, name: str) -> bool | None:
    """What the attention module called ``name`` says, or else the modules around it."""
    parts = name.split(".")
    *around, module = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1))
    causal: bool | None = getattr(module, "is_causal", None)
    if causal:
        return True
    codes = [_code(type(part)) for part in around]
    if any("is_causal" in _texts(code) for code in codes):  # CLIP, whose towers share a class
        return None
    return causal is None and any("causal_mask" in called for code in codes for called in code.co_names)


def _goes_through(module: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in _code(type(module)).co_names


def _code(kind: type[nn.Module]) -> CodeType:
    return getattr(inspect.unwrap(kind.forward), "__code__", (lambda: None).__code__)


def _texts(code: CodeType) -> Iterator[str]:
    """Texts in compiled code; the names of keyword arguments are among them."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (text for text in constant if isinstance(text, str))


def _positions(names: list[str]) -> list[tuple[int, int]]:
    """For each module: number of its layer, and how many layers its stack has. A stack is a list of blocks.

    >>> _positions(["text.layers.0.attn", "text.layers.1.attn", "vision.layers.0.attn", "pool.attn"])
    [(0, 2), (1, 2), (0, 1), (0, 1)]
    """
    stacks: dict[str, list[str]] = {}
    split = []
    for name in names:
        match = re.match(r"(.*?)\.(\d+)(?:\.|$)", name)
        stack, block = (match[1], match[2]) if match else (name, "0")
        blocks = stacks.setdefault(stack, [])
        if block not in blocks:
            blocks.append(block)
        split.append((stack, block))
    return [(stacks[stack].index(block), len(stacks[stack])) for stack, block in split]


def _layer_spec(module: nn.Module, layer: int, layers: int) -> LayerSpec:
    heads = size_of(module, _HEADS, "heads")
    width = size_of(module, _WIDTH, "the width of a head")
    value = getattr(module, "v_head_dim", None)
    return LayerSpec(heads, width, value if isinstance(value, int) else None, None, layer, layers)


def size_of(module: nn.Module, names: tuple[str, ...], what: str) -> int:
    """The first of the names that an attention module or its config has, as a number."""
    config: Any = getattr(module, "config", None)
    for owner in (module, config):
        for name in names:
            if isinstance(found := getattr(owner, name, None), int):
                return found
    raise ValueError(f"swap: {type(module).__name__} does not say {what} (looked for {', '.join(names)})")
