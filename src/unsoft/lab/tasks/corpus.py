"""Text that every machine has: the documentation and the sources that come with Python;
or any file or folder."""

from __future__ import annotations

import hashlib
import sysconfig
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

_TESTED, _VALIDATED = 0.1, 0.1
"""The shares of documents that are kept for the test, and for validation."""


@lru_cache(maxsize=4)
def corpus(path: str = "", *, validation: bool = False) -> tuple[Tensor, ...]:
    """Bytes for training and for the test, and between them for validation if that is asked for; the test is
    the same either way. Documents go wholly to one part, by a digest of their name, whatever else is there.

    A folder: each file in it is a document. A single file: its last tenth is the test, the tenth before that
    validation. Nothing: Python's own documentation topics and the modules of its standard library.
    """
    documents = _documents(Path(path)) if path else _python()
    shares = [_TESTED, _VALIDATED] if validation else [_TESTED]
    if len(documents) == 1:
        (rest,) = documents.values()
        sizes = [int(share * len(rest)) for share in shares]
        contents = []
        for size in sizes:
            cut = len(rest) - size
            contents.append(rest[cut:])
            rest = rest[:cut]
        contents.append(rest)
    else:
        bounds = list(accumulate(shares))
        parts: list[list[bytes]] = [[] for _ in range(len(bounds) + 1)]
        for name, content in sorted(documents.items()):
            digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
            parts[bisect_right(bounds, int.from_bytes(digest, "little") / 2**32)].append(content)
        contents = [b"\n".join(part) for part in parts]
    if not all(contents):
        kept = "validation and the test" if validation else "the test"
        raise ValueError(
            f"text: {path!r} has too few documents to keep some for {kept}; give one longer file, or more of"
            " them"
        )
    return tuple(_tensor(content) for content in reversed(contents))


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
