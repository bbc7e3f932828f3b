"""The attention modules of a transformers model: names, sizes, and whether each can be swapped faithfully.

A module can be swapped if its ``forward`` passes queries, keys and values to transformers' attention
interface. Further arguments must be ones that a mechanism supports; a module that changes the logits in a
way no mechanism supports raises ValueError.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from unsoft.modules.spec import LayerSpec

UNSUPPORTED = {
    "s_aux": "has attention sinks: a learned logit in the normaliser",
    "position_bias": "adds a position bias to its logits",
    "indices": "attends to a choice of keys that it makes itself",
    "block_indices": "attends to a choice of keys that it makes itself",
}
"""Keywords of the attention interface that no mechanism supports, and their meaning."""
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_HEAD_WIDTH = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")
_HIDDEN_WIDTH = ("hidden_size", "embed_dim", "d_model", "n_embd")


@dataclass(frozen=True)
class AttentionModule:
    """An attention module, its name in the model, and its sizes."""

    name: str
    module: nn.Module
    layer_spec: LayerSpec
    causal: bool | None
    """True if it is causal, None if the model decides in every call."""


def attention_modules(model: PreTrainedModel) -> list[AttentionModule]:
    """Return all modules that use the attention interface, in order.

    Raise ValueError if there is none, or if one of them cannot be swapped.
    """
    named = [(name, module) for name, module in model.named_modules() if uses_interface(module)]
    if not named:
        raise ValueError(
            f"swap: {type(model).__name__} cannot be swapped: its attention does not go through"
            " transformers' attention interface"
        )
    for _, module in named:
        if reason := unsupported_reason(type(module)):
            raise ValueError(
                f"swap: {type(model).__name__} cannot be swapped faithfully: {type(module).__name__}"
                f" {reason}, which no mechanism carries"
            )
    positions = _layer_positions([name for name, _ in named])
    return [
        AttentionModule(name, module, _layer_spec(module, layer, layers), _causal(model, name))
        for (name, module), (layer, layers) in zip(named, positions, strict=True)
    ]


def unsupported_reason(kind: type[nn.Module]) -> str | None:
    """Return why an attention class cannot be swapped, or None if it can.

    >>> from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
    >>> unsupported_reason(GptOssAttention)
    'has attention sinks: a learned logit in the normaliser (s_aux)'
    """
    strings = set(code_strings(forward_code(kind)))
    return next((f"{meaning} ({word})" for word, meaning in UNSUPPORTED.items() if word in strings), None)


def has_window(module: nn.Module) -> bool:
    """Return True if the module may hide some earlier keys: a sliding window, or chunks."""
    config = getattr(module, "config", None)
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return window is not None or getattr(config, "attention_chunk_size", None) is not None


def with_hidden_width(attention: AttentionModule, label: str) -> LayerSpec:
    """Return the layer with the width of its hidden state; raise ValueError if a mechanism cannot get it."""
    module = attention.module
    if "hidden_states" not in inspect.signature(module.forward).parameters or not passes_keywords(module):
        raise ValueError(
            f"swap: {label!r} computes something from the hidden state, and {type(module).__name__} does not"
            " pass it on to its attention function; use a mechanism that needs queries and keys only"
        )
    width = _size(module, _HIDDEN_WIDTH, "the width of its hidden state")
    return replace(attention.layer_spec, hidden_dim=width)


def pass_on_inputs(module: nn.Module) -> None:
    """Make an attention module pass its hidden state (``unsoft_hidden``), ``use_cache`` and the angles of its
    rotary embedding (``unsoft_angles``) to the attention function, if the mechanism needs them.

    transformers projects the hidden state and rotates before it calls the attention function, and Gemma keeps
    ``use_cache`` to itself. So a hook adds them as keywords; the module passes unknown keywords on.
    """
    if passes_keywords(module) and _add_inputs not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_add_inputs, with_kwargs=True)


def passes_keywords(module: nn.Module) -> bool:
    """Return True if the forward function takes any keyword; it hands those to the attention function."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _add_inputs(
    module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    swapped = getattr(module, "unsoft", None)
    if swapped is None:
        return None
    more: dict[str, Any] = {}  # stays empty if a later swap has replaced the mechanism by a simpler one
    if swapped.wants_hidden:
        more["unsoft_hidden"] = args[0] if args else options["hidden_states"]
    if swapped.uses_positions and "use_cache" not in options and "past_key_values" in options:
        more["use_cache"] = options["past_key_values"] is not None
    if swapped.rotation is not None:
        more["unsoft_angles"] = swapped.rotation.angles(module, args, options)
    return (args, options | more) if more else None


def _causal(model: PreTrainedModel, name: str) -> bool | None:
    """Read causality from the attention module called ``name``, or else from the modules around it."""
    parts = name.split(".")
    *around, module = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1))
    causal: bool | None = getattr(module, "is_causal", None)
    if causal:
        return True
    codes = [forward_code(type(part)) for part in around]
    if any("is_causal" in code_strings(code) for code in codes):  # CLIP, whose towers share a class
        return None
    return causal is None and any("causal_mask" in called for code in codes for called in code.co_names)


def uses_interface(module: nn.Module) -> bool:
    """Return True if a module calls transformers' attention interface."""
    return "ALL_ATTENTION_FUNCTIONS" in forward_code(type(module)).co_names


def forward_code(kind: type[nn.Module]) -> CodeType:
    """Return the compiled code of a module's forward function, without decorators."""
    return getattr(inspect.unwrap(kind.forward), "__code__", (lambda: None).__code__)


def code_strings(code: CodeType) -> Iterator[str]:
    """Yield the string constants of compiled code, which include the names of keyword arguments."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (text for text in constant if isinstance(text, str))


def _layer_positions(names: list[str]) -> list[tuple[int, int]]:
    """Return for each module its layer number and the number of layers of its stack, a list of blocks.

    >>> _layer_positions(["text.layers.0.attn", "text.layers.1.attn", "vision.layers.0.attn", "pool.attn"])
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
    heads = _size(module, _HEADS, "heads")
    width = _size(module, _HEAD_WIDTH, "the width of a head")
    value = getattr(module, "v_head_dim", None)
    value = value if isinstance(value, int) else None
    length = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    length = length if isinstance(length, int) else None
    return LayerSpec(heads, width, value, None, layer, layers, positions=length)


def _size(module: nn.Module, names: tuple[str, ...], what: str) -> int:
    """Return the first of the named attributes that an attention module or its config has as an int."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            if isinstance(size := getattr(owner, name, None), int):
                return size
    raise ValueError(f"swap: {type(module).__name__} does not say {what} (looked for {', '.join(names)})")
