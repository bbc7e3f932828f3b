"""The cache folder: where it is, and whether files in it can be trusted.

A shared library runs with all rights of the process that loads it. Compiled code is therefore loaded only
from a folder that nobody but its user (and root) can write to. Otherwise a private temporary folder is used,
with a warning that gives the reason and the remedy. Access control lists are not checked.
"""

import atexit
import os
import shutil
import stat
import tempfile
import warnings
from functools import cache
from pathlib import Path

from unsoft.errors import CacheWarning

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_warned: set[str] = set()


def cache_directory() -> Path:
    """Return ``$UNSOFT_CACHE_DIR``, else ``$XDG_CACHE_HOME/unsoft``, else ``~/.cache/unsoft``.

    Without a home folder it is a temporary folder, with a warning.
    """
    if chosen := os.environ.get("UNSOFT_CACHE_DIR"):
        return expand_home(chosen, "UNSOFT_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base, "unsoft") if base else expand_home("~/.cache/unsoft", "UNSOFT_CACHE_DIR")


def models_directory() -> Path:
    """Return the folder of language models converted from another format."""
    return cache_directory() / "models"


def make_private_folder(folder: Path) -> None:
    """Create the folder and its missing parents, readable by this user only."""
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def trusted_folder(folder: Path, beginnings: tuple[str, ...]) -> Path:
    """Return the folder with links resolved, created if missing, or a temporary one if it is not trusted.

    Files whose names start with one of ``beginnings`` are checked as well. Nobody else can change the content
    of a trusted folder, so the files that were checked are the files that are loaded.
    """
    folder = Path(os.path.realpath(folder))
    try:
        make_private_folder(folder)
        reason = distrust(folder, files_in(folder, beginnings))
    except OSError:  # it cannot be made or read at all
        return temporary_folder()
    if reason is None:
        return folder
    _warn_once(
        f"unsoft loads no compiled code from {folder}: {reason}; formulas are compiled again for this"
        " process. Set UNSOFT_CACHE_DIR to a folder that only you can write to, or correct the rights of"
        " this one"
    )
    return temporary_folder()


def expand_home(folder: str, variable: str) -> Path:
    """Return the folder with ``~`` replaced; a private temporary one if that home folder is not known.

    A user id without an entry in the password database has no home folder unless HOME is set. ``variable``:
    the environment variable that chooses another folder, for the warning.
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        _warn_once(
            f"unsoft cannot use the cache folder {folder!r}: the home folder is not known. A temporary folder"
            f" is used instead and deleted when this process ends. Set {variable} to an absolute path"
        )
        return temporary_folder()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, CacheWarning, stacklevel=3)


def files_in(folder: Path, beginnings: tuple[str, ...]) -> list[Path]:
    """Return the files whose names start with one of ``beginnings``, by one listing of the folder."""
    return [folder / name for name in os.listdir(folder) if name.startswith(beginnings)]


@cache
def temporary_folder() -> Path:
    """Return a folder of this process, deleted at exit. Raise PermissionError if it is not private."""
    folder, owner = Path(os.path.realpath(tempfile.mkdtemp(prefix="unsoft-"))), os.getpid()
    if reason := distrust(folder, []):
        folder.rmdir()
        raise PermissionError(f"no folder is safe for compiled code: {reason}")

    def delete() -> None:
        if os.getpid() == owner:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(delete)
    return folder


def distrust(folder: Path, files: list[Path]) -> str | None:
    """Return why others could have put code into the folder (a resolved path) or its files, else None."""
    if not hasattr(
        os, "geteuid"
    ):  # Windows: the user's own folders are protected by their access control lists
        return None
    user, root = os.geteuid(), os.stat("/").st_uid
    for path in (folder, *files):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return f"{path} is a link"
        if status.st_uid != user:
            return f"{path} belongs to user {status.st_uid}, and this process to user {user}"
        if status.st_mode & _WRITABLE_BY_OTHERS:
            return (
                f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w helps)"
            )
    for parent in folder.parents:
        status = os.stat(parent)
        if status.st_uid not in (user, root, 0):
            return f"{parent} belongs to user {status.st_uid}, who can replace what is in it"
        if _others_can_replace_entries(status):
            return f"others can replace what is in {parent} (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _others_can_replace_entries(folder: os.stat_result) -> bool:
    if folder.st_mode & stat.S_ISVTX:  # sticky, as /tmp: an entry is renamed or deleted by its owner only
        return False
    if folder.st_mode & stat.S_IWOTH:
        return True
    return bool(folder.st_mode & stat.S_IWGRP) and not _is_private_group(folder.st_uid, folder.st_gid)


def _is_private_group(uid: int, gid: int) -> bool:
    """Return True for the group that many systems create per user, which home folders are open to."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
