"""Tokens of several bytes for the task ``text``: byte-pair encoding, learned from the training text alone.

Every byte is one character of latin-1, so any file can be encoded and decoded without loss.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.lab.tasks.corpus import corpus

BYTES = 256
_WORDS = r"\s?\w+|\s?[^\s\w]+|\s+"
"""Merges stay within a word with the space before it, a run of signs, or a run of spaces."""


class Encoded(NamedTuple):
    """A corpus in tokens."""

    train: Tensor
    validation: Tensor
    test: Tensor
    bytes_per_token: float
    """Mean over the test text."""
    tokenizer: str
    """As JSON, which the library ``tokenizers`` reads."""


@lru_cache(maxsize=4)
def encode(path: str, vocabulary: int) -> Encoded:
    """The corpus of ``path`` in ``vocabulary`` tokens; the same text gives the same tokens."""
    tokenizers = _library()
    parts = [_lines(part) for part in corpus(path, validation=True)]
    train, _, test = parts
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=[chr(byte) for byte in range(BYTES)],
        show_progress=False,
        special_tokens=[],
    )
    made.train_from_iterator(train, trainer)
    if made.get_vocab_size() < vocabulary:
        raise ValueError(
            f"text: the training text makes only {made.get_vocab_size()} tokens; 'vocabulary' must be at most"
            f" that, not {vocabulary}"
        )
    first, second, third = (
        torch.tensor([token for line in made.encode_batch_fast(lines) for token in line.ids])
        for lines in parts
    )
    return Encoded(first, second, third, sum(map(len, test)) / len(third), made.to_str())


def _lines(part: Tensor) -> list[str]:
    return bytes(part.tolist()).decode("latin-1").splitlines(keepends=True)


def _library() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise ValueError("text: 'level=bpe' needs the library tokenizers; pip install 'unsoft[hf]'") from None
