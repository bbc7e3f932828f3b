"""What steering does to a language model's words: the score of prompts, and the loss on unrelated text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unsoft.lab.interpret.steering.directions import Directions
from unsoft.lab.interpret.steering.states import encoded
from unsoft.lab.interpret.steering.steer import steering

_CHUNK, _CHUNKS = 64, 12
"""Tokens of a piece of unrelated text, and how many pieces."""


@dataclass(frozen=True)
class TextTrial:
    """Prompts, and the words that should, and should not, come next."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[str]
    toward: Sequence[str]
    away: Sequence[str]
    unrelated: str
    options: dict[str, Any]
    """Of :func:`unsoft.lab.interpret.steering.steering`."""

    def __post_init__(self) -> None:
        if len(self.prompts) < 2:
            raise ValueError(f"steer: at least 2 prompts are needed, not {len(self.prompts)}")
        if both := set(self._first_tokens("toward")) & set(self._first_tokens("away")):
            word = self.tokenizer.decode([min(both)])
            raise ValueError(f"steer: words to go toward and away from begin with the same token, {word!r}")
        self._pieces()

    @torch.no_grad()
    def score(self, directions: Directions | None, strength: float) -> Tensor:
        """For each prompt: log odds that a word of ``toward`` comes next rather than one of ``away``."""
        toward, away = self._first_tokens("toward"), self._first_tokens("away")
        found = torch.zeros(len(self.prompts), dtype=torch.float64)
        with self._steered(directions, strength):
            for numbers, ids in self._batches():
                logits = self.model(input_ids=ids).logits[:, -1].double()
                odds = logits[:, toward].logsumexp(-1) - logits[:, away].logsumexp(-1)
                found[numbers] = odds.cpu()
        return found

    @torch.no_grad()
    def loss(self, directions: Directions | None, strength: float) -> Tensor:
        """For each piece of the unrelated text: nats per token."""
        ids = self._pieces()
        with self._steered(directions, strength):
            logits = self.model(input_ids=ids).logits[:, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        return losses.mean(1).cpu()

    def _steered(self, directions: Directions | None, strength: float) -> AbstractContextManager[None]:
        if directions is None:
            return nullcontext()
        return steering(self.model, directions, strength, **self.options)

    def _batches(self) -> Iterator[tuple[list[int], Tensor]]:
        """Prompts of the same length go together, so that nothing is padded."""
        tokens = [encoded(prompt, self.tokenizer, self.model)["input_ids"] for prompt in self.prompts]
        for length in sorted({ids.shape[1] for ids in tokens}):
            numbers = [number for number, ids in enumerate(tokens) if ids.shape[1] == length]
            yield numbers, torch.cat([tokens[number] for number in numbers])

    def _first_tokens(self, side: str) -> list[int]:
        words: Sequence[str] = getattr(self, side)
        found = [self.tokenizer(f" {word}", add_special_tokens=False)["input_ids"][:1] for word in words]
        if not found or not all(found):
            raise ValueError(
                f"steer: argument {side!r} must be words that the tokenizer knows, not {words!r}"
            )
        return sorted({ids[0] for ids in found})

    def _pieces(self) -> Tensor:
        ids = encoded(self.unrelated, self.tokenizer, self.model)["input_ids"][0]
        count = min(_CHUNKS, len(ids) // _CHUNK)
        if count < 2:
            raise ValueError(
                f"steer: the unrelated text has {len(ids)} tokens; at least {2 * _CHUNK} are needed"
            )
        pieces: Tensor = ids[: count * _CHUNK].view(count, _CHUNK)
        return pieces
