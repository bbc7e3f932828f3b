"""Checkpoints that are whole or not there: Trainer writes a folder file by file,
so each gets a seal with digests when it is complete.

A folder without a seal, or with a file that is not what the seal says, is never loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from unsoft.files import write_whole

SEAL = "complete.json"


def seal(folder: Path) -> None:
    """Says that everything in the folder is written, and what it is."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != SEAL:
            with path.open("rb") as file:
                digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
    write_whole(folder / SEAL, json.dumps(digests, indent=1).encode())


def is_whole(folder: Path) -> bool:
    """Is the folder sealed, and every file in it what it was then?"""
    try:
        digests = json.loads((folder / SEAL).read_bytes())
        for name, digest in digests.items():
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return False
    except (OSError, ValueError, AttributeError):
        return False
    return True


def sweep(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and the names of damaged or unfinished ones, which are removed."""
    newest, removed = None, []
    for path in sorted(folder.glob("checkpoint-*"), key=_step, reverse=True):
        if is_whole(path):
            newest = newest or path
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return newest, removed


def _step(path: Path) -> int:
    found = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(found[1]) if found else -1
