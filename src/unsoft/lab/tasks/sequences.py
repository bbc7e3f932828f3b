"""Tasks on sequences of tokens: copy, induction, recall and deletion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import distinct, integers, one_integer, shuffled, take
from unsoft.lab.tasks.task import IGNORE, Batch, MarkedTokens, Setup, Task, chosen, labelled_last, register


@register
@dataclass(frozen=True, kw_only=True)
class Copy(MarkedTokens):
    """Random tokens, a mark, and the same tokens again. Longer sequences in the test than in training."""

    name: ClassVar[str] = "copy"
    tells: ClassVar[str] = "copying a sequence by position, also at lengths not seen in training"
    # Four heads: with one or two, copies are still wrong in places after as many steps.
    setup: ClassVar[Setup] = Setup(layers=2, heads=4, steps=1500, positions=True)
    answers_in_tokens: ClassVar[bool] = True
    difficulty: ClassVar[str] = "length"

    length: int = 8
    """Tokens to copy: 1 to ``length`` while training, exactly ``length`` in the test."""

    @property
    def outputs(self) -> int:
        return self.vocabulary

    def difficulties(self) -> tuple[int, ...]:
        return tuple(sorted({max(self.length // 2, 1), self.length, 2 * self.length, 4 * self.length}))

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        length = one_integer(1, self.length, random) if training else self.length
        tokens = integers(self.vocabulary, (count, length), random)
        mark = torch.full((count, 1), self.vocabulary)
        return labelled_last(torch.cat([tokens, mark, tokens[:, :-1]], 1), tokens)

    def solve(self, inputs: Tensor) -> Tensor:
        """Return the token half a sequence earlier."""
        return chosen(inputs.roll(inputs.shape[1] // 2, 1).clamp(max=self.vocabulary - 1), self.outputs)


@register
@dataclass(frozen=True, kw_only=True)
class Induction(Task):
    """Different tokens in random order, then some of them again in another order:
    each asks for the token that followed it."""

    name: ClassVar[str] = "induction"
    tells: ClassVar[str] = "building an induction head in two layers, also at lengths not seen in training"
    source: ClassVar[str] = "Olsson et al. 2022 (arXiv 2209.11895)"
    setup: ClassVar[Setup] = Setup(layers=2, steps=600, positions=True)
    answers_in_tokens: ClassVar[bool] = True
    difficulty: ClassVar[str] = "length"

    length: int = 8
    """Tokens before the questions."""
    questions: int = 7
    vocabulary: int = 32

    def __post_init__(self) -> None:
        self.at_least(2, "length", "vocabulary")
        self.at_least(1, "questions")
        self.require(
            self.length <= self.vocabulary,
            f"{self.length} different tokens need a vocabulary of as many, not {self.vocabulary}",
        )
        self.require(
            self.questions < self.length,
            f"a length of {self.length} allows at most {self.length - 1} questions, not {self.questions}",
        )

    @property
    def size(self) -> int:
        return self.vocabulary

    def difficulties(self) -> tuple[int, ...]:
        own = self.length
        return tuple(length for length in (own, 2 * own, 4 * own) if length <= self.vocabulary)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        tokens = distinct(count, self.vocabulary, self.length, random)
        which = distinct(count, self.length - 1, self.questions, random)
        return labelled_last(torch.cat([tokens, take(tokens, which)], 1), take(tokens, which + 1))

    def solve(self, inputs: Tensor) -> Tensor:
        """Find the token among those before the questions, and take the next."""
        before = inputs[:, : self.length]
        index = (inputs[:, :, None] == before[:, None]).long().argmax(-1)
        return chosen(take(before, (index + 1).clamp(max=self.length - 1)), self.outputs)


@register
@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Multi-query associative recall.

    form
        "stream", as in zoology: key and value are two tokens, so a model needs two layers; then ``pairs`` of
        the remaining places ask for a key, nearer ones more often by a power law, and random tokens fill the
        rest. "joined": each pair is one token, which one layer can answer.
    power
        1: questions are spread evenly; towards 0: soon after the pairs.
    """

    name: ClassVar[str] = "recall"
    tells: ClassVar[str] = "looking up one key among many"
    source: ClassVar[str] = "Arora, Eyuboglu et al. 2023, Zoology (arXiv 2312.04927)"

    form: str = "stream"
    pairs: int = 4
    length: int = 16
    """Length of the stream; the joined form has one token for each pair and one for each question."""
    keys: int = 16
    values: int = 16
    power: float = 0.01

    def __post_init__(self) -> None:
        self.one_of("form", "stream", "joined")
        self.at_least(1, "pairs", "length", "keys")
        self.at_least(2, "values")
        self.between(0, 1, "power")
        self.require(self.power > 0, "'power' must be more than 0")
        self.require(
            self.pairs <= self.keys, f"{self.pairs} pairs need as many keys, and there are {self.keys}"
        )
        if self.form == "stream":
            self.require(
                self.pairs <= self.values,
                f"{self.pairs} pairs need as many values, and there are {self.values}",
            )
            self.require(self.length % 2 == 0, f"'length' must be even, not {self.length}")
            self.require(
                4 * self.pairs <= self.length,
                f"{self.pairs} pairs and their questions need a length of at least {4 * self.pairs}, not"
                f" {self.length}",
            )

    @property
    def setup(self) -> Setup:
        if self.form == "joined":
            return Setup(steps=400)
        # One head and no higher rate: with two, or with 0.006, the two layers find each other late or never.
        return Setup(layers=2, steps=500, positions=True)

    @property
    def size(self) -> int:
        if self.form == "joined":
            return self.keys * self.values + self.keys
        return self.keys + self.values

    @property
    def outputs(self) -> int:
        return self.values if self.form == "joined" else self.size

    @property
    def answers_in_tokens(self) -> bool:
        return self.form == "stream"

    @property
    def choices(self) -> range:
        start = 0 if self.form == "joined" else self.keys
        return range(start, start + self.values)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        keys = distinct(count, self.keys, self.pairs, random)
        if self.form == "joined":
            values = integers(self.values, (count, self.pairs), random)
            order = distinct(count, self.pairs, self.pairs, random)
            asked = self.keys * self.values + take(keys, order)
            return labelled_last(torch.cat([keys * self.values + values, asked], 1), take(values, order))
        return self._stream(keys, self.keys + distinct(count, self.values, self.pairs, random), random)

    def _stream(self, keys: Tensor, values: Tensor, random: torch.Generator) -> Batch:
        count, start = len(keys), 2 * self.pairs
        inputs = integers(self.size, (count, self.length), random)
        inputs[:, 0:start:2], inputs[:, 1:start:2] = keys, values
        places = (self.length - start) // 2
        # The power law of zoology: the smaller the power, the sooner after the pairs a key is asked.
        likely = torch.arange(1, places + 1, dtype=torch.float64) ** (self.power - 1)
        gaps = torch.multinomial(likely.expand(count, -1), self.pairs, generator=random)
        labels = torch.full_like(inputs, IGNORE)
        inputs.scatter_(1, start + 2 * gaps, keys)
        labels.scatter_(1, start + 2 * gaps, values)
        return Batch(inputs, labels)

    def solve(self, inputs: Tensor) -> Tensor:
        """Look every token up among the pairs."""
        if self.form == "joined":
            pairs = inputs[:, : self.pairs]
            keys, values = pairs // self.values, pairs % self.values
            looked_up = inputs - self.keys * self.values
        else:
            keys, values = inputs[:, 0 : 2 * self.pairs : 2], inputs[:, 1 : 2 * self.pairs : 2]
            looked_up = inputs
        same = looked_up[:, :, None] == keys[:, None]
        return chosen(take(values, same.long().argmax(-1)), self.outputs)


@register
@dataclass(frozen=True, kw_only=True)
class DeletionTask(Task):
    """Find what is left.

    form
        "sum": items lie on ``places`` lists; the question names two of them: which item is on the first and
        not on the second? Which list is added and which subtracted is known only to the question, so one
        layer needs weights of both signs.
        "stream": each token writes a value to one of ``places``, overwrites what is there, or deletes it; in
        the end every place is asked.
    """

    name: ClassVar[str] = "deletion"
    tells: ClassVar[str] = "removing what the query opposes, which needs negative weights"

    form: str = "sum"
    places: int = 4
    items: int = 16
    shared: int = 3
    """Items on both lists of the sum."""
    others: int = 8
    """Items on lists that the sum does not ask for."""
    length: int = 32
    """Length of the stream, with its questions."""
    deleted: float = 0.3
    """Share of the stream's tokens that delete."""

    def __post_init__(self) -> None:
        self.one_of("form", "sum", "stream")
        self.at_least(2, "places", "items")
        self.at_least(0, "shared", "others")
        self.between(0, 1, "deleted")
        if self.form == "stream":
            self.at_least(self.places + 1, "length")
        else:
            self.require(
                self.shared + 2 <= self.items,
                f"'shared' must be at most {self.items - 2} with {self.items} items, not {self.shared}",
            )

    @property
    def setup(self) -> Setup:
        if self.form == "stream":
            return Setup(layers=2, heads=2, steps=2000, batch=128, positions=True)
        return Setup(steps=600, batch=128)

    @property
    def size(self) -> int:
        pairs = self.places * self.items
        return pairs + (self.places**2 if self.form == "sum" else 2 * self.places)

    @property
    def outputs(self) -> int:
        return self.items + (self.form == "stream")

    @property
    def chance(self) -> float:
        if self.form == "sum":
            return 1 / self.items
        return max(self._empty, (1 - self._empty) / self.items)

    @property
    def _empty(self) -> float:
        """Probability that nothing is left at a place of the stream."""
        untouched = (1 - 1 / self.places) ** (self.length - self.places)
        return untouched + (1 - untouched) * self.deleted

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        if self.form == "sum":
            return super().guess(labels, random)
        common = self.items if self._empty > (1 - self._empty) / self.items else 0
        return chosen(torch.full_like(labels, common), self.outputs)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        return self._sum(count, random) if self.form == "sum" else self._stream(count, random)

    def _sum(self, count: int, random: torch.Generator) -> Batch:
        lists = distinct(count, self.places, self.places, random)
        plus, minus = lists[:, :1], lists[:, 1:2]
        drawn = distinct(count, self.items, self.shared + 2, random)
        both, left, other = drawn[:, : self.shared], drawn[:, -2:-1], drawn[:, -1:]
        tokens = [
            plus * self.items + torch.cat([both, left], 1),
            minus * self.items + torch.cat([both, other], 1),
        ]
        if self.others and self.places > 2:
            which = integers(self.places - 2, (count, self.others), random) + 2
            tokens.append(
                take(lists, which) * self.items + integers(self.items, (count, self.others), random)
            )
        asked = self.places * self.items + plus * self.places + minus
        return labelled_last(torch.cat([shuffled(torch.cat(tokens, 1), random), asked], 1), left)

    def _stream(self, count: int, random: torch.Generator) -> Batch:
        steps, pairs = self.length - self.places, self.places * self.items
        places = integers(self.places, (count, steps), random)
        values = integers(self.items, (count, steps), random)
        deletes = torch.rand(count, steps, generator=random) < self.deleted
        left = torch.full((count, self.places), self.items)
        for step in range(steps):
            now = torch.where(deletes[:, step], self.items, values[:, step])
            left.scatter_(1, places[:, step : step + 1], now[:, None])
        order = distinct(count, self.places, self.places, random)
        tokens = torch.where(deletes, pairs + places, places * self.items + values)
        return labelled_last(torch.cat([tokens, pairs + self.places + order], 1), take(left, order))

    def solve(self, inputs: Tensor) -> Tensor:
        """The sum: +1 for every item of the first list, -1 for every one of the second.

        The stream: the last token of each place.
        """
        return self._signed_sum(inputs) if self.form == "sum" else self._last(inputs)

    def _signed_sum(self, inputs: Tensor, minus: float = -1.0) -> Tensor:
        asked = inputs[:, -1:] - self.places * self.items
        lists, what = inputs[:, :-1] // self.items, inputs[:, :-1] % self.items
        weight = (lists == asked // self.places).float() + minus * (lists == asked % self.places).float()
        total = torch.zeros(len(inputs), self.items).scatter_add_(1, what, weight)
        return total[:, None].expand(-1, inputs.shape[1], -1)

    def shortcut(self, inputs: Tensor) -> Tensor | None:
        """Read only the first list of the sum, like non-negative weights; None for the stream."""
        return self._signed_sum(inputs, minus=0.0) if self.form == "sum" else None

    def _last(self, inputs: Tensor) -> Tensor:
        pairs, steps = self.places * self.items, self.length - self.places
        tokens, asked = inputs[:, :steps], inputs[:, None, :] - pairs - self.places
        deletes = tokens >= pairs
        touched = torch.where(deletes, tokens - pairs, tokens // self.items)
        value = torch.where(deletes, self.items, tokens % self.items)
        # The number of the step where it touches the place that is asked, else 0: the maximum is the last.
        hits = (touched[:, :, None] == asked) * torch.arange(1, steps + 1)[:, None]  # (batch, steps, length)
        last = hits.argmax(1)
        left = torch.where(hits.amax(1) > 0, value.gather(1, last), self.items)
        return chosen(left, self.outputs)
