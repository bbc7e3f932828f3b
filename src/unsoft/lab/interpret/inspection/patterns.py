"""The attention of every head on a few short sentences, small enough to stand in a page."""

from __future__ import annotations

import base64
from collections.abc import Sequence as Texts
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.lab.interpret.inspection.batches import batches
from unsoft.lab.interpret.inspection.observe import Seen, observe
from unsoft.lab.interpret.inspection.sequence import sequences
from unsoft.lab.interpret.inspection.walk import evaluating, model_of, runner

MOST_TOKENS = 32


@dataclass(frozen=True)
class Pattern:
    """One sentence: its tokens and, for each layer, the weights (heads, n, n)."""

    text: str
    tokens: list[str]
    layers: dict[int, Tensor]

    def to_dict(self) -> dict[str, Any]:
        """Weights as bytes in base64, one signed byte each, 127 for the largest size of a head; scales undo
        that."""
        layers = {}
        for number, weights in self.layers.items():
            scale = weights.abs().amax((-2, -1)).clamp_min(torch.finfo(weights.dtype).tiny)
            small = (weights / scale[:, None, None] * 127).round().to(torch.int8)
            content = base64.b64encode(bytes(small.flatten().view(torch.uint8).tolist())).decode()
            layers[number] = {"scales": scale.tolist(), "weights": content}
        return {"tokens": self.tokens, "layers": layers}


def find_patterns(
    model: nn.Module, texts: Texts[str], tokenizer: Any, tokens: int = MOST_TOKENS
) -> list[Pattern]:
    """Patterns of the first ``tokens`` tokens of each text.

    >>> Pattern("a b", ["a", "b"], {0: torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])}).to_dict()["layers"][0]
    {'scales': [1.0], 'weights': 'fwBAQA=='}
    """
    model = model_of(model)
    found = []
    with evaluating(model):
        for text in texts:
            first = batches(text, tokenizer, 1, tokens, model.device)[0]
            keeper = _Keeper()
            with observe(model, keeper):
                runner(model)(**first.inputs)
            found.append(Pattern(text, first.labels[0], keeper.layers))
    return found


class _Keeper:
    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}

    def attention(self, seen: Seen) -> None:
        if seen.query.shape[-2] != seen.key.shape[-2]:
            return
        (sequence,) = sequences(seen, [None])
        self.layers[seen.number] = sequence.whole().cpu()

    def stream(self, stack: str, depth: int, states: Tensor) -> None: ...
