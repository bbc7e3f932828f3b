"""Measures of captions: objects that are not in the scene (CHAIR, Rohrbach et al. 2018), missed objects."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.scenes.captions import (
    END,
    HABIT,
    IMAGE,
    NUMBER,
    PAD,
    PROMPT,
    START,
    WORDS,
    mentioned,
    true_caption,
)
from experiments.scenes.drawing import Scene
from unsoft.lab.interpret.steering import Directions, steering

_LONGEST = 32


@dataclass(frozen=True)
class Described:
    """Captions of scenes, with three counts (scenes,)."""

    captions: list[list[str]]
    named: Tensor
    """Objects that the caption names."""
    invented: Tensor
    """Named objects that are not in the picture."""
    missed: Tensor
    """Objects in the picture that it does not name."""

    @property
    def chair_objects(self) -> float:
        """CHAIR per object: share of named objects that are not in the picture."""
        return float(self.invented.sum() / self.named.sum().clamp_min(1))

    @property
    def chair_captions(self) -> float:
        """CHAIR per caption: share of captions with an invented object."""
        return float((self.invented > 0).double().mean())


def describe(
    model: PreTrainedModel,
    scenes: Sequence[Scene],
    directions: Directions | None = None,
    strength: float = 0.0,
) -> Described:
    """Write greedy captions, unsteered or steered."""
    prompt = torch.tensor([PROMPT] * len(scenes))
    with steered(model, directions, strength):
        written = model.generate(  # type: ignore[operator]
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            pixel_values=pictures(scenes),
            max_new_tokens=_LONGEST,
            suppress_tokens=[NUMBER[word] for word in (PAD, START, IMAGE)],
            do_sample=False,
        )
    captions = [_until_end([WORDS[token] for token in row]) for row in written[:, prompt.shape[1] :].tolist()]
    return counted(captions, scenes)


def counted(captions: list[list[str]], scenes: Sequence[Scene]) -> Described:
    """Count objects in captions.

    >>> from experiments.scenes.drawing import Thing
    >>> scene = Scene((Thing("bar", "red", 3), Thing("arch", "red", 4)), noise=0)
    >>> described = counted([["a", "bar", "in", "red", ",", "a", "ring", "in", "blue", "<end>"]], [scene])
    >>> described.named.item(), described.invented.item(), described.missed.item(), described.chair_objects
    (2.0, 1.0, 1.0, 0.5)
    """
    named = [set(mentioned(caption)) for caption in captions]
    shapes = [scene.shapes for scene in scenes]
    return Described(
        captions,
        torch.tensor([float(len(words)) for words in named], dtype=torch.float64),
        torch.tensor([float(len(words - true)) for words, true in zip(named, shapes, strict=True)]).double(),
        torch.tensor([float(len(true - words)) for words, true in zip(named, shapes, strict=True)]).double(),
    )


@torch.no_grad()
def caption_loss(
    model: PreTrainedModel,
    scenes: Sequence[Scene],
    directions: Directions | None = None,
    strength: float = 0.0,
) -> Tensor:
    """Return (scenes,): nats per token of the true captions."""
    texts = [[NUMBER[word] for word in true_caption(scene)] for scene in scenes]
    logits, ids = _read(model, scenes, texts, directions, strength)
    losses = torch.nn.functional.cross_entropy(logits.mT, ids, reduction="none")
    lengths = torch.tensor([len(text) for text in texts])
    inside = torch.arange(ids.shape[1]) < lengths[:, None]
    return (losses * inside).sum(1) / lengths


@torch.no_grad()
def against_habit(
    model: PreTrainedModel,
    scenes: Sequence[Scene],
    directions: Directions | None = None,
    strength: float = 0.0,
) -> Tensor:
    """Return (scenes,): log odds that no neighbour is invented after the circle, cross or triangle.

    The caption is true up to there; each scene has one of the three shapes.
    """
    texts = [_habitual(scene) for scene in scenes]
    logits, ids = _read(model, scenes, texts, directions, strength)
    last = torch.tensor([[len(text) - back for back in (3, 2, 1)] for text in texts])
    likely = -torch.nn.functional.cross_entropy(logits.mT, ids, reduction="none")
    ahead = likely.gather(1, last).sum(1)
    return torch.log(-torch.expm1(ahead)) - ahead


def _read(
    model: PreTrainedModel,
    scenes: Sequence[Scene],
    texts: Sequence[list[int]],
    directions: Directions | None,
    strength: float,
) -> tuple[Tensor, Tensor]:
    """Return logits and words (scenes, longest text) of captions; shorter ones are padded."""
    longest = max(map(len, texts))
    ids = torch.tensor([PROMPT + text + [NUMBER[END]] * (longest - len(text)) for text in texts])
    with steered(model, directions, strength):
        logits = model(input_ids=ids, pixel_values=pictures(scenes)).logits
    return logits[:, len(PROMPT) - 1 : -1].double(), ids[:, len(PROMPT) :]


def _habitual(scene: Scene) -> list[int]:
    """Return the true caption up to the shape with a habitual neighbour, and then that neighbour."""
    (lead,) = scene.shapes & set(HABIT)
    words = true_caption(scene)
    end = words.index(lead) + 3
    return [NUMBER[word] for word in (*words[:end], ",", "a", HABIT[lead])]


def pictures(scenes: Sequence[Scene]) -> Tensor:
    """Return pixels (scenes, 3, 32, 32)."""
    return torch.stack([scene.picture() for scene in scenes])


def steered(
    model: PreTrainedModel, directions: Directions | None, strength: float
) -> AbstractContextManager[None]:
    """Return a context that steers, or does nothing without directions."""
    return nullcontext() if directions is None else steering(model, directions, strength)


def _until_end(words: list[str]) -> list[str]:
    return words[: words.index(END) + 1] if END in words else words
