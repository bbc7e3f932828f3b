"""Tasks of MAD (Poli et al. 2024): recall in context, with noise or with keys of several tokens; selective
copy, compression and memorisation.
"""

from __future__ import annotations

import math
import random as python_random
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from unsoft.lab.tasks.draw import distinct, generator, integers, one_integer
from unsoft.lab.tasks.task import IGNORE, Batch, MarkedTokens, Setup, Task, chosen, labelled_last, register

MAD = "Poli et al. 2024, Mechanistic design (arXiv 2403.17844)"


@register
@dataclass(frozen=True, kw_only=True)
class InContextRecall(Task):
    """Key, value, key, value, ...: a key has the same value throughout a sequence,
    and is asked whenever it comes again."""

    name: ClassVar[str] = "in-context-recall"
    tells: ClassVar[str] = "looking up a key among many repetitions of few pairs"
    source: ClassVar[str] = MAD
    # Four keys, each of which comes often: eight are not learned in 1,000 steps.
    setup: ClassVar[Setup] = Setup(layers=2, steps=400, positions=True)
    answers_in_tokens: ClassVar[bool] = True

    length: int = 32
    keys: int = 4
    values: int = 16
    noise: float = 0.0
    """Share of pairs that are replaced by random tokens."""
    noise_tokens: int = 16

    def __post_init__(self) -> None:
        self.at_least(4, "length")
        self.at_least(1, "keys", "noise_tokens")
        self.at_least(2, "values")
        self.between(0, 0.9, "noise")
        self.require(self.length % 2 == 0, f"'length' must be even, not {self.length}")

    @property
    def size(self) -> int:
        return self.keys + self.values + self.noise_tokens

    @property
    def choices(self) -> range:
        return range(self.keys, self.keys + self.values)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        pairs = self.length // 2
        meaning = integers(self.values, (count, self.keys), random) + self.keys
        keys = integers(self.keys, (count, pairs), random)
        noisy = torch.rand(count, pairs, generator=random) < self.noise
        # One pair before the last is no noise, and the last asks for it: every sequence has an answer.
        kept = integers(pairs - 1, (count, 1), random)
        noisy.scatter_(1, kept, False)
        noisy[:, -1] = False
        keys[:, -1:] = keys.gather(1, kept)
        seen = one_hot(keys, self.keys) * ~noisy[..., None]
        before = (seen.cumsum(1) - seen).gather(2, keys[..., None]).squeeze(-1) > 0
        values = meaning.gather(1, keys)
        inputs = torch.stack([keys, values], -1)
        noise = integers(self.noise_tokens, (count, pairs, 2), random) + self.keys + self.values
        inputs = torch.where(noisy[..., None], noise, inputs)
        asked = torch.where(before & ~noisy, values, IGNORE)
        labels = torch.stack([asked, torch.full_like(asked, IGNORE)], -1)
        return Batch(inputs.flatten(1), labels.flatten(1))

    def solve(self, inputs: Tensor) -> Tensor:
        """Take the token that followed the same key."""
        keys, values = inputs[:, 0::2], inputs[:, 1::2]
        earlier = torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool).tril(-1)
        first = ((keys[:, :, None] == keys[:, None]) & earlier).long().argmax(-1)
        recalled = values.gather(1, first)
        return chosen(recalled.repeat_interleave(2, 1), self.outputs)


@register
@dataclass(frozen=True, kw_only=True)
class NoisyRecall(InContextRecall):
    """In-context recall of which a share is noise."""

    name: ClassVar[str] = "noisy-recall"
    tells: ClassVar[str] = "looking up keys among irrelevant tokens"
    setup: ClassVar[Setup] = replace(InContextRecall.setup, steps=600)

    noise: float = 0.2
    noise_tokens: int = 4
    """With sixteen of them the task is not learned in 800 steps."""


Word = tuple[int, ...]


@register
@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(Task):
    """Keys are words of 1 to ``longest`` key tokens and values words of as many value tokens; when a key
    comes again, every token of its value is asked. In the test all keys have the full length. Sequences are
    filled up with a blank in front."""

    name: ClassVar[str] = "fuzzy-recall"
    tells: ClassVar[str] = "looking up keys that consist of several tokens"
    source: ClassVar[str] = MAD
    # Few tokens, each of which comes often, and so many words that the last token of a key is not enough
    # to tell them apart: with six keys and three words 3,000 steps are too few.
    setup: ClassVar[Setup] = Setup(layers=2, steps=1200, positions=True)
    answers_in_tokens: ClassVar[bool] = True

    length: int = 48
    keys: int = 3
    """Key tokens."""
    values: int = 4
    """Value tokens."""
    longest: int = 2
    words: int = 6
    """Keys in a sequence."""

    def __post_init__(self) -> None:
        self.at_least(1, "longest", "words")
        self.at_least(max(2, self.longest), "keys", "values")
        self.at_least(4 * self.longest, "length")
        full = math.perm(self.keys, self.longest)
        self.require(
            self.words <= full,
            f"{self.keys} key tokens make {full} words of length {self.longest}, fewer than {self.words}",
        )

    @property
    def size(self) -> int:
        return self.keys + self.values + 1

    @property
    def choices(self) -> range:
        return range(self.keys, self.keys + self.values)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        source = python_random.Random(one_integer(0, 2**31 - 1, random))
        rows = [self._sequence(source, training) for _ in range(count)]
        return Batch(
            torch.tensor([tokens for tokens, _ in rows]), torch.tensor([labels for _, labels in rows])
        )

    def _dictionary(self, source: python_random.Random, training: bool) -> list[tuple[Word, Word]]:
        dictionary: dict[Word, Word] = {}
        while len(dictionary) < self.words:
            shorter = training and len(dictionary) < self.keys
            size = source.randint(1, self.longest) if shorter else self.longest
            key = tuple(source.sample(range(self.keys), size))
            values = range(self.keys, self.keys + self.values)
            dictionary[key] = tuple(source.sample(values, source.randint(1, self.longest)))
        return list(dictionary.items())

    def _sequence(self, source: python_random.Random, training: bool) -> tuple[list[int], list[int]]:
        words = self._dictionary(source, training)
        tokens: list[int] = []
        labels: list[int] = []
        seen: set[Word] = set()
        for last in (False, True):
            while True:
                # The last pair has been seen before: every sequence has an answer.
                known = [pair for pair in words if pair[0] in seen]
                key, value = source.choice(known if last else words)
                room = self.length - len(tokens) - (0 if last else 2 * self.longest)
                if len(key) + len(value) > room:
                    break
                asked = list(value) if key in seen else [IGNORE] * len(value)
                tokens += [*key, *value]
                # A label is one position before the token that it predicts.
                labels += [IGNORE] * (len(key) - 1) + asked + [IGNORE]
                seen.add(key)
                if last:
                    break
        blank = self.length - len(tokens)
        return [self.keys + self.values] * blank + tokens, [IGNORE] * blank + labels

    def solve(self, inputs: Tensor) -> Tensor:
        """Read keys and values as runs of their kind of token, and look every key up."""
        answers = torch.full_like(inputs, self.keys)
        for row, tokens in enumerate(inputs.tolist()):
            known: dict[Word, Word] = {}
            key: Word = ()
            value: Word = ()
            for index, token in enumerate(tokens):
                if token < self.keys:
                    if value:
                        known.setdefault(key, value)
                        key, value = (), ()
                    key += (token,)
                elif token < self.keys + self.values:
                    value += (token,)
                expected = known.get(key, ())
                if len(value) < len(expected):
                    answers[row, index] = expected[len(value)]
        return chosen(answers, self.outputs)


@register
@dataclass(frozen=True, kw_only=True)
class SelectiveCopy(Task):
    """Tokens at random places between blanks, a mark, and as many blanks as tokens: repeat the
    tokens there, in their order."""

    name: ClassVar[str] = "selective-copy"
    tells: ClassVar[str] = "copying selected tokens in order"
    source: ClassVar[str] = MAD
    setup: ClassVar[Setup] = Setup(layers=2, heads=2, steps=800, positions=True)
    answers_in_tokens: ClassVar[bool] = True

    length: int = 20
    tokens: int = 4
    """Number of tokens to copy."""
    vocabulary: int = 8

    def __post_init__(self) -> None:
        self.at_least(1, "tokens")
        self.at_least(2, "vocabulary")
        self.at_least(2 * self.tokens + 1, "length")

    @property
    def size(self) -> int:
        return self.vocabulary + 2

    @property
    def outputs(self) -> int:
        return self.vocabulary

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        blank, mark = self.vocabulary, self.vocabulary + 1
        inputs = torch.full((count, self.length), blank)
        free = self.length - self.tokens - 1
        places = distinct(count, free, self.tokens, random).sort(1).values
        tokens = integers(self.vocabulary, (count, self.tokens), random)
        inputs.scatter_(1, places, tokens)
        inputs[:, free] = mark
        return labelled_last(inputs, tokens)

    def solve(self, inputs: Tensor) -> Tensor:
        """Collect the tokens before the mark that are not blank."""
        before = inputs[:, : self.length - self.tokens - 1]
        tokens = before[before < self.vocabulary].reshape(-1, self.tokens)
        unasked = torch.zeros(len(inputs), self.length - self.tokens, dtype=torch.long)
        return chosen(torch.cat([unasked, tokens], 1), self.outputs)


@register
@dataclass(frozen=True, kw_only=True)
class Compression(MarkedTokens):
    """Random tokens and a mark; all tokens are read from the output of the mark, so labels are (batch,
    length, tokens).

    MAD reads them with an MLP that knows the position; here it is the last linear map of the model.
    """

    name: ClassVar[str] = "compression"
    tells: ClassVar[str] = "gathering a whole sequence in one token"
    source: ClassVar[str] = MAD
    setup: ClassVar[Setup] = Setup(layers=2, heads=4, steps=1000, positions=True)

    length: int = 6
    """Tokens before the mark."""

    @property
    def outputs(self) -> int:
        return self.length * self.vocabulary

    @property
    def choices(self) -> range:
        return range(self.vocabulary)

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        return chosen(integers(self.vocabulary, tuple(labels.shape), random), self.vocabulary).flatten(-2)

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        tokens = integers(self.vocabulary, (count, self.length), random)
        inputs = torch.cat([tokens, torch.full((count, 1), self.vocabulary)], 1)
        labels = torch.full((count, self.length + 1, self.length), IGNORE)
        labels[:, -1] = tokens
        return Batch(inputs, labels)

    def solve(self, inputs: Tensor) -> Tensor:
        """Return every token at its position."""
        read = chosen(inputs[:, :-1], self.vocabulary).flatten(1)
        return read[:, None].expand(-1, inputs.shape[1], -1)


@register
@dataclass(frozen=True, kw_only=True)
class Memorisation(Task):
    """Key, blank, key, blank, ...: at each blank give the value of the key before it,
    which is the same in every sequence ever drawn.

    Facts are those of training, since there is nothing else to be known:
    the control in which the mechanism should not matter.
    """

    name: ClassVar[str] = "memorisation"
    tells: ClassVar[str] = "storing facts in the weights: a control, attention should make no difference"
    source: ClassVar[str] = MAD
    setup: ClassVar[Setup] = Setup(layers=2, steps=300, positions=True)

    length: int = 16
    keys: int = 64
    values: int = 64
    facts: int = 0
    """The seed of the facts."""

    def __post_init__(self) -> None:
        self.at_least(2, "length", "values")
        self.at_least(1, "keys")
        self.require(self.length % 2 == 0, f"'length' must be even, not {self.length}")

    @property
    def size(self) -> int:
        return self.keys + 1

    @property
    def outputs(self) -> int:
        return self.values

    def _values(self) -> Tensor:
        return integers(self.values, (self.keys,), generator(self.facts, "facts"))

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        keys = integers(self.keys, (count, self.length // 2), random)
        inputs = torch.stack([keys, torch.full_like(keys, self.keys)], -1)
        labels = torch.stack([torch.full_like(keys, IGNORE), self._values()[keys]], -1)
        return Batch(inputs.flatten(1), labels.flatten(1))

    def solve(self, inputs: Tensor) -> Tensor:
        """Look the facts up."""
        values = self._values()[inputs[:, 0::2]]
        return chosen(values.repeat_interleave(2, 1), self.outputs)
