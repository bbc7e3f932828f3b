"""Writes files and folders whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Writes aside, then renames: whatever happens, the file is either the old one or the new one, whole."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(unfinished, 0o644)
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write in, which becomes ``path`` (new, or empty) when all has been written; after a failure nothing is left.

    >>> with tempfile.TemporaryDirectory() as place:
    ...     with whole_folder(Path(place) / "out") as unfinished:
    ...         count = (unfinished / "file").write_text("all of it")
    ...     [file.name for file in (Path(place) / "out").iterdir()]
    ['file']
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        if path.exists():
            path.rmdir()
        unfinished.replace(path)
    except OSError as problem:
        raise OSError(problem.errno, f"{path} cannot be written: {problem.strerror or problem}") from problem
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
