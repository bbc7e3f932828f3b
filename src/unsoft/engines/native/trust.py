"""May code be loaded from a folder? Only if nobody but its user (and root) can put anything into it.

A shared library runs with all rights of the process that loads it, so a folder that others can write to is as
good as a program of theirs. Where that is so, a private temporary folder is used instead, and a warning says
why and what helps. Access control lists are not looked at.
"""

from __future__ import annotations

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


def make_private_folder(folder: Path) -> None:
    """Makes the folder and the missing ones above it, all for this user only."""
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def trusted_folder(folder: Path, beginnings: tuple[str, ...]) -> Path:
    """The folder with all links resolved, made if need be; or a private temporary one,
    if that one cannot be trusted.

    ``beginnings``: of the names of the files that will be loaded from it. Once the folder has been found to
    be trustworthy nobody else can change what is in it, so what was checked is what is loaded.
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
    """Those whose names begin so; one look at the folder, which may hold thousands."""
    return [folder / name for name in os.listdir(folder) if name.startswith(beginnings)]


@cache
def temporary_folder() -> Path:
    """A folder of this process alone, deleted when it ends; PermissionError if even there others could plant
    code."""
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
    """Why somebody else could have put code into the folder (a resolved path) or the files in it;
    None if nobody could."""
    if not hasattr(
        os, "geteuid"
    ):  # Windows: the user's own folders are protected by their access control lists
        return None
    user, root = os.geteuid(), os.stat("/").st_uid
    for path in (folder, *files):
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            return f"{path} is a link"
        if found.st_uid != user:
            return f"{path} belongs to user {found.st_uid}, and this process to user {user}"
        if found.st_mode & _WRITABLE_BY_OTHERS:
            return f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o}; chmod go-w helps)"
    for parent in folder.parents:
        found = os.stat(parent)
        if found.st_uid not in (user, root, 0):
            return f"{parent} belongs to user {found.st_uid}, who can replace what is in it"
        if _others_can_replace_entries(found):
            return f"others can replace what is in {parent} (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _others_can_replace_entries(folder: os.stat_result) -> bool:
    if folder.st_mode & stat.S_ISVTX:  # sticky, as /tmp: an entry is renamed or deleted by its owner only
        return False
    if folder.st_mode & stat.S_IWOTH:
        return True
    return bool(folder.st_mode & stat.S_IWGRP) and not _is_private_group(folder.st_uid, folder.st_gid)


def _is_private_group(uid: int, gid: int) -> bool:
    """Is it the group that many systems make for each user, with nobody else in it?

    Home folders are open to that one.
    """
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
