"""Fuzzy recall: keys and values are several tokens long."""

from __future__ import annotations

import random as python_random
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unsoft.lab.tasks.draw import one_integer
from unsoft.lab.tasks.in_context_recall import MAD
from unsoft.lab.tasks.registry import register
from unsoft.lab.tasks.task import IGNORE, Batch, Retelling, Setup, chosen

Word = tuple[int, ...]


@register
@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(Retelling):
    """Keys are words of 1 to ``longest`` key tokens and values words of as many value tokens; when a key
    comes again, every token of its value is asked. In the test all keys have the full length. Sequences are
    filled up with a blank in front."""

    name: ClassVar[str] = "fuzzy-recall"
    tells: ClassVar[str] = "mechanisms that put a key together from several tokens before they look it up"
    source: ClassVar[str] = MAD

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
        self.at_least(2, "keys", "values")
        self.at_least(4 * self.longest, "length")
        for knob in ("keys", "values"):
            self.at_least(self.longest, knob)
        full = 1
        for used in range(self.longest):
            full *= self.keys - used
        self.require(
            self.words <= full,
            f"{self.keys} key tokens make {full} words of length {self.longest}, fewer than {self.words}",
        )

    @property
    def setup(self) -> Setup:
        # Few tokens, each of which comes often, and so many words that the last token of a key is not enough
        # to tell them apart: with six keys and three words 3,000 steps are too few.
        return Setup(layers=2, steps=1200, positions=True)

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
