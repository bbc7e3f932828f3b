"""Results on disk, by what they are results of: same question, same code, same numbers, no second run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import unsoft
from unsoft.engines.native.compiler import cache_directory
from unsoft.engines.native.trust import make_private_folder
from unsoft.files import write_whole

_ROOMS = ("report", "cli", "hf")
"""Rooms whose code does not change a measurement."""


class Store:
    """A folder of JSON files. A file is whole or not there; one that cannot be read counts as not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> dict[str, Any] | None:
        try:
            found = json.loads(self._path(key).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("key") == key else None

    def put(self, key: str, content: Mapping[str, Any]) -> None:
        make_private_folder(self.folder)
        write_whole(self._path(key), json.dumps({"key": key, **content}).encode())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def key_of(question: Mapping[str, Any]) -> str:
    """Forty digits that stand for a question, the code that answers it and the torch it runs on.

    >>> key_of({"a": 1}) == key_of({"a": 1}), key_of({"a": 1}) == key_of({"a": 2})
    (True, False)
    """
    content = {"question": question, "code": code_digest(), "torch": torch.__version__}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:40]


@cache
def code_digest() -> str:
    """Of every file of the package that can change a number."""
    package, total = Path(unsoft.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*")):
        parts = path.relative_to(package).parts
        if path.suffix in (".py", ".h", ".cpp") and parts[0] not in _ROOMS:
            total.update(str(parts).encode() + path.read_bytes())
    return total.hexdigest()


def default_folder() -> Path:
    """``UNSOFT_COMPARE_DIR``, or ``compare`` beside the compiled formulas."""
    given = os.environ.get("UNSOFT_COMPARE_DIR")
    return Path(given).expanduser() if given else cache_directory() / "compare"
