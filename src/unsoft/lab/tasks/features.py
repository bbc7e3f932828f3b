"""Tasks whose inputs are vectors: census, needle, focus and opposition.

An item has a direction (``dim`` numbers), a label (one of ``labels``) and a mark; marks are for tokens that
are no items, such as the question. Directions are larger than labels, since they are compared and labels only
read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from unsoft.lab.tasks.draw import distinct, integers, normal, one_integer, shuffled, take
from unsoft.lab.tasks.task import Batch, Setup, Task, chosen, labelled_last, register

_DIRECTION, _LABEL, _MARK = 4.0, 2.0, 2.0


def directions(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Return unit vectors in random directions."""
    return normalize(normal(shape, random), dim=-1)


def across_from(asked: Tensor, vectors: Tensor) -> Tensor:
    """Return the parts of vectors that are orthogonal to the directions ``asked``, scaled to length 1."""
    return normalize(vectors - (vectors * asked).sum(-1, keepdim=True) * asked, dim=-1)


def blurred(vectors: Tensor, noise: float, random: torch.Generator) -> Tensor:
    """Add noise whose expected squared length is ``noise`` squared."""
    # Each of n dimensions gets a variance of noise^2 / n, so that difficulty does not depend on n.
    return vectors + noise * normal(tuple(vectors.shape), random) / math.sqrt(vectors.shape[-1])


def items(directions: Tensor, values: Tensor, labels: int, marks: int) -> Tensor:
    """Return items (batch, n, dim + labels + marks) with directions (batch, n, dim) and labels (batch, n)."""
    unmarked = torch.zeros(*values.shape, marks)
    return torch.cat([directions * _DIRECTION, one_hot(values, labels) * _LABEL, unmarked], -1)


def question(directions: Tensor, labels: int, marks: int, mark: int = -1) -> Tensor:
    """Return tokens of the same shape without a label and with a mark."""
    unlabelled = torch.zeros(*directions.shape[:-1], labels)
    marked = torch.zeros(*directions.shape[:-1], marks)
    marked[..., mark] = _MARK
    return torch.cat([directions * _DIRECTION, unlabelled, marked], -1)


def directions_of(inputs: Tensor, dim: int) -> Tensor:
    """Return the directions of tokens, scaled to length 1 (0 where there is none)."""
    return normalize(inputs[..., :dim], dim=-1)


def cosines(inputs: Tensor, dim: int) -> Tensor:
    """Return the cosine of every item to the question, which is the last token; (batch, n)."""
    where = directions_of(inputs, dim)
    return (where[:, :-1] @ where[:, -1:].mT).squeeze(-1)


def labels_of(inputs: Tensor, dim: int, labels: int) -> Tensor:
    """Return the labels of items, (batch, n)."""
    return inputs[..., dim : dim + labels].argmax(-1)


@dataclass(frozen=True, kw_only=True)
class Lookup(Task):
    """Base of tasks that ask for the label of one item."""

    kind: ClassVar[str] = "features"

    labels: int = 8
    """Number of labels."""
    noise: float = 0.1
    """Noise between the directions of an item and its question."""
    dim: int = 16
    """Dimensions of a direction."""

    @property
    def size(self) -> int:
        return self.dim + self.labels + 1

    @property
    def outputs(self) -> int:
        return self.labels


_SAME = 0.8
"""Cosine above which two items come from one source. With noise 0.3, the most, two copies have a cosine of
about 1 / 1.09 = 0.92."""


@register
@dataclass(frozen=True, kw_only=True)
class Census(Task):
    """Return the majority vote of the sources.

    Items are noisy copies of their source; some sources are copied much more often.
    """

    name: ClassVar[str] = "census"
    tells: ClassVar[str] = "counting sources once that were copied several times"
    kind: ClassVar[str] = "features"
    difficulty: ClassVar[str] = "repeats"
    setup: ClassVar[Setup] = Setup(steps=600)
    outputs: ClassVar[int] = 2

    sources: int = 5
    repeats: int = 8
    """A source has (repeats + 1) / 2 copies on average.

    While training it is 1 to ``repeats``, in the test exactly ``repeats``.
    """
    noise: float = 0.1
    dim: int = 16

    def __post_init__(self) -> None:
        self.at_least(3, "sources")
        self.at_least(1, "repeats")
        self.at_least(2, "dim")
        self.between(0, 0.3, "noise")
        self.require(
            self.sources % 2 == 1, f"'sources' must be odd, so that there is a majority, not {self.sources}"
        )

    @property
    def size(self) -> int:
        return self.dim + 2 + 2

    def difficulties(self) -> tuple[int, ...]:
        own = self.repeats
        return tuple(sorted({1, max(own // 4, 1), max(own // 2, 1), own, 2 * own, 8 * own, 64 * own}))

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        repeats = one_integer(1, self.repeats, random) if training else self.repeats
        length = self.sources * (repeats + 1) // 2
        centres = directions((count, self.sources, self.dim), random)
        votes = integers(2, (count, self.sources), random)
        # One copy of each, the others by weights so uneven that copies often outvote sources.
        weights = torch.rand(count, self.sources, generator=random) ** 3 + 1e-3
        more = torch.multinomial(weights, max(length - self.sources, 1), replacement=True, generator=random)
        which = torch.cat([torch.arange(self.sources).expand(count, -1), more[:, : length - self.sources]], 1)
        copies = items(blurred(take(centres, which), self.noise, random), take(votes, which), 2, 2)
        nowhere = torch.zeros(count, 1, self.dim)
        inputs = torch.cat([question(nowhere, 2, 2, 0), shuffled(copies, random), question(nowhere, 2, 2)], 1)
        return labelled_last(inputs, (votes.sum(1, keepdim=True) * 2 > self.sources).long())

    def solve(self, inputs: Tensor) -> Tensor:
        """Weigh every item by 1 / the number of items with its direction."""
        return self._count(inputs, by_source=True)

    def shortcut(self, inputs: Tensor) -> Tensor:
        """Count copies, like a mechanism that cannot compare keys with each other."""
        return self._count(inputs, by_source=False)

    def _count(self, inputs: Tensor, by_source: bool) -> Tensor:
        copies = inputs[:, 1:-1]
        direction = directions_of(copies, self.dim)
        alike = (direction @ direction.mT > _SAME).float()
        weight = 1 / alike.sum(-1) if by_source else torch.ones(copies.shape[:2])
        yes = (weight * labels_of(copies, self.dim, 2)).sum(-1) * 2 > weight.sum(-1)
        return chosen(yes.long()[:, None].expand(-1, inputs.shape[1]), 2)


@register
@dataclass(frozen=True, kw_only=True)
class Needle(Lookup):
    """Find the label of the item with the direction of the question, among a crowd with a similar direction
    and another label.
    """

    name: ClassVar[str] = "needle"
    tells: ClassVar[str] = "retrieval among near-duplicate distractors"
    difficulty: ClassVar[str] = "crowd"
    setup: ClassVar[Setup] = Setup(steps=800)

    crowd: int = 8
    """Near-duplicates: 1 to ``crowd`` while training, exactly ``crowd`` in the test."""
    similarity: float = 0.9
    """Cosine between the question and the crowd."""
    distractors: int = 4
    """Items that point anywhere."""

    def __post_init__(self) -> None:
        self.at_least(1, "crowd")
        self.at_least(0, "distractors")
        self.at_least(2, "labels", "dim")
        self.between(-1, 0.999, "similarity")
        self.between(0, 2, "noise")

    def difficulties(self) -> tuple[int, ...]:
        few = {1, max(self.crowd // 4, 1)}
        return tuple(sorted({*few, *(self.crowd * factor for factor in (1, 4, 16, 64))}))

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        crowd = one_integer(1, self.crowd, random) if training else self.crowd
        asked = directions((count, 1, self.dim), random)
        across = across_from(asked, directions((count, 1, self.dim), random))
        # Unit vectors whose cosine to the question is exactly the similarity.
        close = self.similarity * asked + (1 - self.similarity**2) ** 0.5 * across
        where = torch.cat(
            [blurred(asked, self.noise, random), blurred(close.expand(-1, crowd, -1), self.noise, random)], 1
        )
        values = integers(self.labels, (count, 2), random)
        labels = torch.cat([values[:, :1], values[:, 1:].expand(-1, crowd)], 1)
        if self.distractors:
            where = torch.cat([where, directions((count, self.distractors, self.dim), random)], 1)
            labels = torch.cat([labels, integers(self.labels, (count, self.distractors), random)], 1)
        evidence = shuffled(items(where, labels, self.labels, 1), random)
        query = question(blurred(asked, self.noise, random), self.labels, 1)
        return labelled_last(torch.cat([evidence, query], 1), values[:, :1])

    def solve(self, inputs: Tensor) -> Tensor:
        """Take the item with the largest cosine to the question."""
        nearest = cosines(inputs, self.dim).argmax(-1, keepdim=True)
        values = labels_of(inputs, self.dim, self.labels).gather(1, nearest)
        return chosen(values.expand(-1, inputs.shape[1]), self.labels)


@register
@dataclass(frozen=True, kw_only=True)
class Focus(Lookup):
    """Find the label of the item with the direction of the question. All others have random directions; each
    question asks for another item.
    """

    name: ClassVar[str] = "focus"
    tells: ClassVar[str] = "finding one key as the context grows"
    source: ClassVar[str] = "the setting of Su 2023 (focus of attention), trained"
    difficulty: ClassVar[str] = "length"
    setup: ClassVar[Setup] = Setup(steps=400, batch=8)

    length: int = 128
    """Items and questions."""
    questions: int = 32
    labels: int = 16
    dim: int = 8

    def __post_init__(self) -> None:
        self.at_least(1, "questions")
        self.at_least(2, "labels", "dim")
        self.between(0, 1, "noise")
        self.at_least(1, "length")
        self.require(
            self.length >= 2 * self.questions,
            f"{self.questions} questions need a length of at least {2 * self.questions}, not {self.length}",
        )

    def difficulties(self) -> tuple[int, ...]:
        shorter = max(self.length // 2, 2 * self.questions)
        return tuple(sorted({shorter, *(self.length * factor for factor in (1, 8, 32, 128))}))

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        many = self.length - self.questions
        where = directions((count, many, self.dim), random)
        values = integers(self.labels, (count, many), random)
        which = distinct(count, many, self.questions, random)
        asked = question(blurred(take(where, which), self.noise, random), self.labels, 1)
        return labelled_last(torch.cat([items(where, values, self.labels, 1), asked], 1), take(values, which))

    def solve(self, inputs: Tensor) -> Tensor:
        """Take the item with the largest cosine to the question."""
        where, many = directions_of(inputs, self.dim), self.length - self.questions
        nearest = torch.zeros(where.shape[:2], dtype=torch.long)  # any answer will do where none is asked for
        nearest[:, many:] = (where[:, many:] @ where[:, :many].mT).argmax(-1)
        return chosen(take(labels_of(inputs[:, :many], self.dim, self.labels), nearest), self.labels)


_CLEAR = 0.5
"""Cosine from which an item is evidence: halfway between those across (0) and those along (1)."""


@register
@dataclass(frozen=True, kw_only=True)
class Opposition(Lookup):
    """One item may point where the question points, or exactly against it; all others point across it.

    Answers: the label of the item that supports (0 to labels - 1),
    of the one that opposes (labels to 2 labels - 1), or 2 labels: neither.
    """

    name: ClassVar[str] = "opposition"
    tells: ClassVar[str] = "telling support, opposition and neither apart with one head"
    setup: ClassVar[Setup] = Setup(steps=400, batch=128)
    chance: ClassVar[float] = 1 / 3  # always "neither"

    irrelevant: int = 15
    labels: int = 4

    def __post_init__(self) -> None:
        self.at_least(1, "irrelevant", "labels")
        self.at_least(3, "dim")
        self.between(0, 1, "noise")

    @property
    def outputs(self) -> int:
        return 2 * self.labels + 1

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        return chosen(torch.full_like(labels, 2 * self.labels), self.outputs)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        asked = directions((count, 1, self.dim), random)
        case = integers(3, (count, 1), random)  # support, opposition, neither
        where = across_from(asked, directions((count, self.irrelevant + 1, self.dim), random))
        sign = torch.tensor([1.0, -1.0, 0.0])[case][..., None]
        where[:, :1] = torch.where(sign == 0, where[:, :1], sign * asked)
        values = integers(self.labels, (count, self.irrelevant + 1), random)
        answer = self._code(case == 0, case == 1, values[:, :1])
        evidence = shuffled(items(blurred(where, self.noise, random), values, self.labels, 1), random)
        return labelled_last(torch.cat([evidence, question(asked, self.labels, 1)], 1), answer)

    def _code(self, supports: Tensor, opposes: Tensor, values: Tensor) -> Tensor:
        """Return the answers for the labels ``values`` of the relevant items."""
        return torch.where(supports, values, torch.where(opposes, self.labels + values, 2 * self.labels))

    def _answer(self, inputs: Tensor, sees_opposition: bool) -> Tensor:
        cosine = cosines(inputs, self.dim)
        size = cosine.abs() if sees_opposition else cosine
        strongest = size.argmax(-1, keepdim=True)
        values = labels_of(inputs, self.dim, self.labels).gather(1, strongest)
        signed = cosine.gather(1, strongest)
        answer = self._code(signed > _CLEAR, signed < -_CLEAR, values)
        return chosen(answer.expand(-1, inputs.shape[1]), self.outputs)

    def solve(self, inputs: Tensor) -> Tensor:
        """Take the item with the largest absolute cosine to the question."""
        return self._answer(inputs, sees_opposition=True)

    def shortcut(self, inputs: Tensor) -> Tensor:
        """See support only, like one head with non-negative weights: opposition looks like neither."""
        return self._answer(inputs, sees_opposition=False)
