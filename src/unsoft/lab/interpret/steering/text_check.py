"""Check the steering of a language model with pairs of texts, from the examples to the verdict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unsoft.checks import finite
from unsoft.lab.interpret.steering.controls import DRAWS, Bound, Judgement, judge
from unsoft.lab.interpret.steering.directions import BLOCK, Directions
from unsoft.lab.interpret.steering.fit import LAST, check_method, check_pairs, encoded, paired_states
from unsoft.lab.interpret.steering.steer import ALL, steering

MARGIN = 0.1
"""Nats per token by which the loss on unrelated text may rise."""
_CHUNK, _CHUNKS = 64, 12
"""Tokens of a piece of unrelated text, and the number of pieces."""


@dataclass(frozen=True)
class TextExamples:
    """Examples of what should change, and of what should not."""

    positive: Sequence[str]
    negative: Sequence[str]
    prompts: Sequence[str]
    """Held-out prompts, which directions are not fitted to."""
    toward: Sequence[str]
    """Words that should come next more often after the prompts, and (``away``) less often."""
    away: Sequence[str]
    other: tuple[Sequence[str], Sequence[str]]
    """Pairs of another task."""
    unrelated: str

    def __post_init__(self) -> None:
        check_pairs(self.positive, self.negative)
        check_pairs(*self.other)
        if used := set(self.prompts) & {*self.positive, *self.negative}:
            raise ValueError(f"steer: held-out prompts must not be among the pairs, as {min(used)!r} is")


def check_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: TextExamples,
    *,
    method: str = "mean",
    layers: int | str | Iterable[int | str] | None = None,
    site: str = BLOCK,
    pool: str = LAST,
    strength: float = 0.1,
    positions: str | Collection[int] = ALL,
    keep_norm: bool = False,
    draws: int = DRAWS,
    progress: Callable[[str], None] = lambda step: None,
) -> tuple[Directions, Judgement]:
    """Fit directions and measure all controls; see :func:`unsoft.lab.interpret.steering.fit` and
    :func:`unsoft.lab.interpret.steering.steering` for the arguments."""
    check_method(method)
    finite("steer", "strength", strength)
    trial = TextTrial(model, tokenizer, examples, {"positions": positions, "keep_norm": keep_norm})
    states, elsewhere = (
        paired_states(model, *pairs, tokenizer, layers=layers, site=site, pool=pool)
        for pairs in ((examples.positive, examples.negative), examples.other)
    )
    directions = states.directions(method)
    judgement = judge(
        trial.score,
        directions,
        strength,
        shuffled=lambda seed: states.shuffled(seed, method),
        other=elsewhere.directions(method),
        bounds=[Bound("unrelated loss", trial.loss, MARGIN, "nats per token")],
        items="held-out prompts",
        draws=draws,
        progress=progress,
    )
    return directions, judgement


@dataclass(frozen=True)
class TextTrial:
    """Measurements of a steered language model: a score on prompts, and the loss on unrelated text."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    examples: TextExamples
    options: dict[str, Any]
    """Options of :func:`unsoft.lab.interpret.steering.steering`."""

    def __post_init__(self) -> None:
        if len(self.examples.prompts) < 2:
            raise ValueError(f"steer: at least 2 prompts are needed, not {len(self.examples.prompts)}")
        if both := set(self._first_tokens("toward")) & set(self._first_tokens("away")):
            word = self.tokenizer.decode([min(both)])
            raise ValueError(f"steer: words to go toward and away from begin with the same token, {word!r}")
        self._pieces()

    @torch.no_grad()
    def score(self, directions: Directions | None, strength: float) -> Tensor:
        """Return for each prompt the log odds that a word of ``toward`` comes next, not one of ``away``."""
        toward, away = self._first_tokens("toward"), self._first_tokens("away")
        scores = torch.zeros(len(self.examples.prompts), dtype=torch.float64)
        with self._steered(directions, strength):
            for numbers, ids in self._batches():
                logits = self.model(input_ids=ids).logits[:, -1].double()
                odds = logits[:, toward].logsumexp(-1) - logits[:, away].logsumexp(-1)
                scores[numbers] = odds.cpu()
        return scores

    @torch.no_grad()
    def loss(self, directions: Directions | None, strength: float) -> Tensor:
        """Return the loss (nats per token) of each piece of the unrelated text."""
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
        """Yield prompts of the same length together, so that nothing is padded."""
        tokens = [
            encoded(prompt, self.tokenizer, self.model)["input_ids"] for prompt in self.examples.prompts
        ]
        for length in sorted({ids.shape[1] for ids in tokens}):
            numbers = [number for number, ids in enumerate(tokens) if ids.shape[1] == length]
            yield numbers, torch.cat([tokens[number] for number in numbers])

    def _first_tokens(self, side: str) -> list[int]:
        words: Sequence[str] = getattr(self.examples, side)
        first = [self.tokenizer(f" {word}", add_special_tokens=False)["input_ids"][:1] for word in words]
        if not first or not all(first):
            raise ValueError(
                f"steer: argument {side!r} must be words that the tokenizer knows, not {words!r}"
            )
        return sorted({ids[0] for ids in first})

    def _pieces(self) -> Tensor:
        ids = encoded(self.examples.unrelated, self.tokenizer, self.model)["input_ids"][0]
        count = min(_CHUNKS, len(ids) // _CHUNK)
        if count < 2:
            raise ValueError(
                f"steer: the unrelated text has {len(ids)} tokens; at least {2 * _CHUNK} are needed"
            )
        pieces: Tensor = ids[: count * _CHUNK].view(count, _CHUNK)
        return pieces
