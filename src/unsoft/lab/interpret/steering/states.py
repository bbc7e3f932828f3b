"""States of a model on examples: one vector for each example and layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unsoft.lab.interpret.steering.places import modules_at, states_of

LAST, MEAN = "last", "mean"
POOLS = (LAST, MEAN)


@contextmanager
def watching(
    model: PreTrainedModel, site: str, layers: Iterable[int], see: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Calls ``see`` with layer and states (batch, tokens, width) in every forward pass; changes nothing."""
    modules = modules_at(model, site)

    def hook(layer: int) -> Callable[..., None]:
        return lambda module, given, output: see(layer, states_of(output))

    hooks = [modules[layer].register_forward_hook(hook(layer)) for layer in layers]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


@torch.no_grad()
def text_states(
    model: PreTrainedModel,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    site: str,
    layers: Sequence[int],
    pool: str = LAST,
) -> dict[int, Tensor]:
    """For each layer (texts, width) in float32: the state of a text's last token, or the mean over all.

    Each text goes through the model alone, so that no padding can change a number.
    """
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def see(layer: int, states: Tensor) -> None:
        kept = states[0, -1] if pool == LAST else states[0].mean(0)
        found[layer].append(kept.float().cpu())

    with watching(model, site, layers, see):
        for text in texts:
            model(**encoded(text, tokenizer, model))
    return {layer: torch.stack(kept) for layer, kept in found.items()}


def encoded(text: str, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Mapping[str, Any]:
    """A text as the model's arguments; ValueError if it has no token."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"].to(model.device)
    if ids.shape[1] == 0:
        raise ValueError(f"steer: the text {text!r} has no token")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
