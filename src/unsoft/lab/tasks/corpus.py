"""Corpora of text: the documentation and sources that come with Python, or any file or folder; as bytes, or
as tokens of byte-pair encoding (BPE), learned from the training text alone.

BPE maps every byte to one character of latin-1, so any file can be encoded and decoded without loss.
"""

from __future__ import annotations

import hashlib
import importlib
import sysconfig
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TESTED, _VALIDATED = 0.1, 0.1
"""Shares of documents for the test and for validation."""


@lru_cache(maxsize=4)
def corpus(path: str = "", *, validation: bool = False) -> tuple[Tensor, ...]:
    """Return the bytes for training and for the test, with those for validation between them if requested;
    the test is the same either way. A document belongs to one part, by a digest of its name.

    A folder: each file in it is a document. A single file: its last tenth is the test, the tenth before that
    validation. Nothing: Python's own documentation topics and the modules of its standard library.
    """
    shares = [_TESTED, _VALIDATED] if validation else [_TESTED]
    contents = [b"\n".join(part) for part in split(read_documents(path), shares)]
    if not all(contents):
        kept = "validation and the test" if validation else "the test"
        raise ValueError(
            f"text: {path!r} has too few documents to keep some for {kept}; give one longer file, or more of"
            " them"
        )
    return tuple(_tensor(content) for content in reversed(contents))


def read_documents(path: str = "") -> dict[str, bytes]:
    """Return the documents of a file or folder by name; without a path, the text that comes with Python."""
    return _documents(Path(path)) if path else _python()


def split(documents: Mapping[str, bytes], shares: Sequence[float]) -> list[list[bytes]]:
    """Return the documents of each share, then those of the rest. A document belongs to one part, by a digest
    of its name; a single one is cut, so that its end is the first share.
    """
    if len(documents) == 1:
        (rest,) = documents.values()
        sizes = [int(share * len(rest)) for share in shares]
        contents = []
        for size in sizes:
            cut = len(rest) - size
            contents.append([rest[cut:]])
            rest = rest[:cut]
        return [*contents, [rest]]
    bounds = list(accumulate(shares))
    parts: list[list[bytes]] = [[] for _ in range(len(bounds) + 1)]
    for name, content in sorted(documents.items()):
        digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
        parts[bisect_right(bounds, int.from_bytes(digest, "little") / 2**32)].append(content)
    return parts


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _documents(path: Path) -> dict[str, bytes]:
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            documents = {str(file.relative_to(path)): file.read_bytes() for file in files}
        else:
            documents = {path.name: path.read_bytes()}
    except OSError as problem:
        raise ValueError(f"text: {str(path)!r} cannot be read: {problem.strerror}") from None
    if not any(documents.values()):
        raise ValueError(f"text: {str(path)!r} is empty")
    return documents


def _python() -> dict[str, bytes]:
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    documents = {f"topic {name}": text.encode() for name, text in topics.items()}
    return documents | {file.name: file.read_bytes() for file in sorted(library.glob("*.py"))}


BYTES = 256
_WORDS = r"\s?\w+|\s?[^\s\w]+|\s+"
"""Merges stay within a word with the space before it, a run of punctuation, or a run of spaces."""


def train_tokenizer(lines: Sequence[str], vocabulary: int) -> Any:
    """Return the tokenizer that byte-pair encoding learns from lines with bytes as characters of latin-1."""
    tokenizers = _library()
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=[chr(byte) for byte in range(BYTES)],
        show_progress=False,
        special_tokens=[],
    )
    made.train_from_iterator(lines, trainer)
    if made.get_vocab_size() < vocabulary:
        raise ValueError(
            f"language: the training text makes only {made.get_vocab_size()} tokens; 'vocabulary' must be at"
            f" most that, not {vocabulary}"
        )
    return made


def _library() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise ValueError("language: tokens need the library tokenizers; pip install 'unsoft[hf]'") from None
