"""The store of studies: one SQLite file with one row for each run. Many may read it, only the driver
writes.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sqlite3
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from unsoft.lab.study.record import COLUMNS, CUT, DONE, RUNNING, Record

NAME = "study.db"
_SCHEMA = 2
_ADDED = ("figures",)
"""Fields that stores of earlier versions lack; their runs have none of it."""
_NAMES = ", ".join(f'"{name}"' for name in COLUMNS)
_TABLES = f"""
create table if not exists studies (name text primary key, definition text not null, begun text not null);
create table if not exists runs ({_NAMES}, primary key (study, key));
"""
_PUT = (
    f"insert into runs ({_NAMES}) values ({', '.join('?' * len(COLUMNS))})"
    " on conflict (study, key) do update set "
    + ", ".join(f'"{name}" = excluded."{name}"' for name in COLUMNS)
)


class StudyStore:
    """A store, open for reading, or with ``write`` for the one process that drives a study.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / NAME
    >>> with StudyStore(path, write=True) as store:
    ...     store.put([Record(study="s", group="g", task="copy", mechanism="cog", key="k", seed=0, lr=0.1)])
    >>> with StudyStore(path) as store:
    ...     [record.status for record in store.records()]
    ['waiting']
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        self.path = path
        self._lock = _claim(path) if write else None
        try:
            if write:
                self._base = sqlite3.connect(path, isolation_level=None)
            else:
                if not path.is_file():
                    raise ValueError(f"study: there is no store {str(path)!r}; unsoft study run makes one")
                self._base = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            self._base.row_factory = sqlite3.Row
            self._check(write)
            if write:  # only now, because it changes the file
                self._base.execute("pragma journal_mode = wal")
                self._base.execute("pragma synchronous = normal")
        except sqlite3.Error as problem:
            self.close()
            raise ValueError(f"study: {str(path)!r} is not a store of studies: {problem}") from None
        except ValueError:
            self.close()
            raise

    def _check(self, write: bool) -> None:
        version = self._base.execute("pragma user_version").fetchone()[0]
        is_empty = self._base.execute("select count(*) from sqlite_master").fetchone()[0] == 0
        if write and version == 0 and is_empty:
            self._base.executescript(_TABLES)
            self._base.execute(f"pragma user_version = {_SCHEMA}")
        elif version != _SCHEMA:
            raise ValueError(
                f"study: {str(self.path)!r} was written by another version of unsoft"
                f" (schema {version}, not {_SCHEMA}); it was not changed, choose another folder (--out)"
            )
        fields = {row["name"] for row in self._base.execute("pragma table_info(runs)")}
        if write and sorted(set(COLUMNS) - fields) == sorted(_ADDED) and fields <= set(COLUMNS):
            for name in _ADDED:
                self._base.execute(f"alter table runs add column {name} default '{{}}'")
            fields |= set(_ADDED)
        if unknown := sorted(fields.symmetric_difference(COLUMNS) - set(() if write else _ADDED)):
            raise ValueError(
                f"study: runs in {str(self.path)!r} do not have the fields of this version of unsoft"
                f" ({', '.join(unknown)} differ); it was not changed, choose another folder (--out)"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the store."""
        if hasattr(self, "_base"):
            self._base.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, name: str, definition: dict[str, Any]) -> None:
        """Store the definition of a study; ValueError if its rules changed after its first run began."""
        before = self.definition(name)
        if before is not None and before["rules"] != definition["rules"]:
            raise ValueError(
                f"study: the rule of {name!r} was another one when its first run began; give the study"
                " another name or another folder"
            )
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._base.execute(
            "insert into studies values (?, ?, ?)"
            " on conflict (name) do update set definition = excluded.definition",
            (name, json.dumps(definition), now),
        )
        # A driver that was killed leaves runs behind as running.
        self._base.execute("update runs set status = ? where study = ? and status = ?", (CUT, name, RUNNING))

    def definition(self, name: str) -> dict[str, Any] | None:
        """Return the definition of a study as plain data."""
        row = self._base.execute("select definition from studies where name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def studies(self) -> dict[str, str]:
        """Return the names of the studies, with the time at which each began."""
        rows = self._base.execute("select name, begun from studies order by begun, name")
        return dict(map(tuple, rows))

    def put(self, records: Iterable[Record]) -> None:
        """Write records, all or none; an existing run is replaced."""
        rows = [tuple(record.to_row().values()) for record in records]
        self._base.execute("begin")
        self._base.executemany(_PUT, rows)
        self._base.execute("commit")

    def records(self, study: str | None = None) -> list[Record]:
        """Return all runs, or those of one study, in the order of the plan."""
        where, values = ("", ()) if study is None else (" where study = ?", (study,))
        rows = self._base.execute(f"select * from runs{where} order by rowid", values)
        return [Record.from_row(dict(row)) for row in rows]

    def finished(self, key: str) -> Record | None:
        """Return the run with this key if any study of this store has finished it."""
        row = self._base.execute("select * from runs where key = ? and status = ?", (key, DONE)).fetchone()
        return None if row is None else Record.from_row(dict(row))


def _claim(path: Path) -> Any:
    """Lock a file beside the store; the lock ends with this process, however that ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(f"{path.name}.lock"), "a+")  # noqa: SIM115 (closed with the store)
    except OSError as problem:
        raise ValueError(f"study: {str(path)!r} cannot be written: {problem.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise ValueError(
            f"study: {holder} is running a study in {str(path)!r}; wait for it, or choose another folder"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock
