"""How the hidden state reaches a mechanism that computes something from it, such as a forget gate.

transformers' attention modules project it before they call the attention function, so a hook hands it over as
one more keyword, which they pass on with all others that they do not know.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import nn

from unsoft.hf.architecture import Found, size_of
from unsoft.modules.spec import LayerSpec

KEYWORD = "unsoft_hidden"
_WIDTH = ("hidden_size", "embed_dim", "d_model", "n_embd")


def with_hidden(found: Found, label: str) -> LayerSpec:
    """The layer of an attention module, with the width of its hidden state; ValueError if that cannot reach a
    mechanism."""
    parameters = inspect.signature(found.module.forward).parameters
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "hidden_states" not in parameters or not passes_on:
        raise ValueError(
            f"swap: {label!r} computes something from the hidden state, and {type(found.module).__name__}"
            " does not pass it on to its attention function; use a mechanism that needs queries and keys only"
        )
    return replace(
        found.layer_spec, hidden_dim=size_of(found.module, _WIDTH, "the width of its hidden state")
    )


def bring_hidden(module: nn.Module) -> None:
    """Makes an attention module hand its hidden state over."""
    if _hand_over not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _hand_over(
    module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    swapped = getattr(module, "unsoft", None)
    if swapped is None or not swapped.wants_hidden:  # swapped again since
        return None
    hidden = args[0] if args else options["hidden_states"]
    return args, options | {KEYWORD: hidden}
