"""Answers on disk, keyed by question, code and torch version, so that nothing is measured twice."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import unsoft
from unsoft.cache_dir import cache_directory, distrust, expand_home, make_private_folder
from unsoft.files import package_digest, write_whole

_APART = ("cli/", "hf/", "lab/interpret/", "lab/report/")
"""Folders whose code changes no measurement. Measurements on a model add the digest of their own folders."""
_NAME = re.compile(r"[0-9a-f]{40}\.json")


class AnswerStore:
    """A folder of JSON files, written atomically; a file that cannot be read counts as missing.

    >>> import tempfile
    >>> store = AnswerStore(Path(tempfile.mkdtemp()))
    >>> store.put(key_of({"a": 1}), {"rows": [3]})
    >>> store.get(key_of({"a": 1}))["rows"], store.get(key_of({"a": 2})), store.clear()
    ([3], None, 1)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> dict[str, Any] | None:
        try:
            content = json.loads(self._path(key).read_text())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) and content.get("key") == key else None

    def put(self, key: str, content: Mapping[str, Any]) -> None:
        make_private_folder(self.folder)
        write_whole(self._path(key), json.dumps({"key": key, **content}).encode())

    def trusts(self, key: str) -> bool:
        """Return True if only the user can have written this entry; needed before running kept code."""
        return distrust(Path(os.path.realpath(self.folder)), [self._path(key)]) is None

    def files(self) -> list[Path]:
        """Return all entries, and what interrupted writes left behind."""
        return [path for path in sorted(self.folder.glob("*.json*")) if _NAME.match(path.name)] + [
            path for path in sorted(self.folder.glob(".*.tmp")) if _NAME.match(path.name[1:])
        ]

    def clear(self) -> int:
        """Delete all entries and return how many there were. Other files in the folder stay."""
        files = self.files()
        for path in files:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # missing, or not empty
            self.folder.rmdir()
        return sum(path.suffix == ".json" for path in files)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def key_of(question: Mapping[str, Any]) -> str:
    """Return a digest of a question, the code that answers it and the version of torch.

    >>> key_of({"a": 1}) == key_of({"a": 1}), key_of({"a": 1}) == key_of({"a": 2})
    (True, False)
    """
    content = {"question": question, "code": code_digest(), "torch": torch.__version__}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:40]


@cache
def code_digest(*folders: str) -> str:
    """Return the digest of every file that can change a measurement, or of the files in ``folders``."""
    if folders:
        return package_digest(lambda path: path.startswith(folders))
    return package_digest(lambda path: not path.startswith(_APART))


def outside_digest(thing: Callable[..., object]) -> str:
    """Return the digest of the file that defines a function or class, or "" if it is in the package.

    Files of the package are covered by :func:`code_digest`.

    >>> outside_digest(code_digest), len(outside_digest(json.dumps))
    ('', 64)
    """
    file = outside_file(thing)
    return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()


def outside_file(thing: Callable[..., object]) -> Path | None:
    """Return the file that defines a function or class; None if it is in the package, or not in a file."""
    try:
        file = Path(inspect.getfile(inspect.unwrap(thing)))
    except TypeError:
        return None
    return file if file.is_file() and not file.is_relative_to(Path(unsoft.__file__).parent) else None


def folder_digest(folder: Path) -> str:
    """Return the digest of the names and contents of all files in a folder, without its subfolders."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with open(path, "rb") as file:
                total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def default_folder() -> Path:
    """Return ``UNSOFT_COMPARE_DIR``, or ``compare`` in the cache folder."""
    folder = os.environ.get("UNSOFT_COMPARE_DIR")
    return expand_home(folder, "UNSOFT_COMPARE_DIR") if folder else cache_directory() / "compare"
