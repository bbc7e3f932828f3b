"""Atomic writing of files and folders, and digests of the package."""

import csv
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UNFINISHED = ".tmp"
"""Suffix of files and folders that are not complete yet; their names start with a dot."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: to a temporary file, which is then renamed."""
    with _named(path):
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
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
def _named(path: Path) -> Iterator[None]:
    """Name ``path`` in errors that are raised while it is written."""
    try:
        yield
    except OSError as problem:
        raise OSError(problem.errno, f"{path} cannot be written: {problem.strerror or problem}") from problem


def write_json(path: Path, content: object) -> None:
    """Write plain data as JSON, one value on a line."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table with the columns of all rows, in the order of their first occurrence."""
    write_whole(path, csv_text(rows).encode())


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table as CSV. Texts that a spreadsheet would read as a formula get an apostrophe in front.

    >>> csv_text([{"word": "=1+1", "size": -2}, {"word": "plain", "more": None}])
    "word,size,more\\n'=1+1,-2,\\nplain,,\\n"
    """
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _escape(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _escape(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in tuple("=+-@") else value


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes ``path`` (new, or empty) at the end; a failure leaves nothing.

    >>> with tempfile.TemporaryDirectory() as parent:
    ...     with whole_folder(Path(parent) / "out") as unfinished:
    ...         count = (unfinished / "file").write_text("all of it")
    ...     [file.name for file in (Path(parent) / "out").iterdir()]
    ['file']
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED))
    try:
        with _named(path):
            yield unfinished
            unfinished.chmod(0o755)
            if path.exists():
                path.rmdir()
            unfinished.replace(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def package_digest(wanted: Callable[[str], bool]) -> str:
    """Return a digest of the names and contents of the source files for which ``wanted`` is true, called with
    paths such as "tasks/text.py".

    >>> package_digest(lambda path: path == "files.py") == package_digest(lambda path: path == "errors.py")
    False
    """
    import unsoft

    package, total = Path(unsoft.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package)
        if path.suffix in (".py", ".h", ".cpp", ".txt") and wanted(name.as_posix()):
            total.update(str(name.parts).encode() + path.read_bytes())
    return total.hexdigest()
