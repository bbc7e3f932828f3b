"""Text that every machine has: the documentation and the sources that come with Python;
or any file or folder."""

from __future__ import annotations

import hashlib
import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

_TESTED = 0.1
"""The share of documents that is kept for the test."""


@lru_cache(maxsize=4)
def corpus(path: str = "") -> tuple[Tensor, Tensor]:
    """Bytes for training and for the test. Documents go wholly to one of them, by a digest of their name,
    whatever else is there.

    A folder: each file in it is a document. A single file: its last tenth is the test. Nothing: Python's own
    documentation topics and the modules of its standard library.
    """
    documents = _documents(Path(path)) if path else _python()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, content in sorted(documents.items()):
        digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
        parts[int.from_bytes(digest, "little") / 2**32 < _TESTED].append(content)
    train, test = (b"\n".join(part) for part in parts)
    if len(documents) == 1:
        (whole,) = documents.values()
        cut = len(whole) - int(_TESTED * len(whole))
        train, test = whole[:cut], whole[cut:]
    if not train or not test:
        raise ValueError(
            f"text: {path!r} has too few documents to keep some for the test; give one file, or more of them"
        )
    return _tensor(train), _tensor(test)


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _documents(path: Path) -> dict[str, bytes]:
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            found = {str(file.relative_to(path)): file.read_bytes() for file in files}
        else:
            found = {path.name: path.read_bytes()}
    except OSError as problem:
        raise ValueError(f"text: {str(path)!r} cannot be read: {problem.strerror}") from None
    if not any(found.values()):
        raise ValueError(f"text: {str(path)!r} is empty")
    return found


def _python() -> dict[str, bytes]:
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    found = {f"topic {name}": text.encode() for name, text in topics.items()}
    found |= {file.name: file.read_bytes() for file in sorted(library.glob("*.py"))}
    return found
