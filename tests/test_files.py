"""Files that are written whole or not at all."""

import errno
import os

import pytest

from unsoft.files import write_whole


def test_a_file_that_cannot_be_written_is_named_and_the_old_one_stays(tmp_path, monkeypatch):
    path = tmp_path / "log"
    write_whole(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="log cannot be written: No space left on device") as caught:
        write_whole(path, b"new")
    assert caught.value.errno == errno.ENOSPC
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("log", b"old")]


def test_readers_of_the_old_file_keep_it_whole(tmp_path):
    """The new content gets a file of its own, so that an open file never changes under its reader."""
    path = tmp_path / "log"
    write_whole(path, b"old content")
    with path.open("rb") as reader:
        write_whole(path, b"new")
        assert reader.read() == b"old content"
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o644
