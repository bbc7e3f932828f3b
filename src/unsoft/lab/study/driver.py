"""Runs a study: gives runs to workers, writes what comes back, and can be stopped and started again at any
moment.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from unsoft.lab.study.local import LOST, NODE_LOST, LocalWorkers
from unsoft.lab.study.plan import Run, Study
from unsoft.lab.study.record import CUT, DONE, FAILED, RUNNING, WAITING, Record
from unsoft.lab.study.row import done, planned, words
from unsoft.lab.study.store import NAME, Store
from unsoft.signals import STOPS, handled

_TRIES = 3
"""So often a run is begun whose worker dies."""
_NODES = 5
"""So often a run is begun whose node is lost; after that it is left for the next command. Without a limit a
run that takes its machine down would end every node of a cluster."""
RUNS = "runs"


class Workers(Protocol):
    """Who performs runs: processes on this machine, or a cluster."""

    @property
    def slots(self) -> int:
        """How many runs can be under way at a time."""

    def free(self) -> int:
        """How many more runs could be given now; ConnectionError if there is no machine left."""

    def submit(self, key: str, job: dict[str, Any]) -> None:
        """Gives a run."""

    def wait(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Runs that ended, with what came of them."""

    def stop(self) -> None:
        """Asks all runs to save themselves and to end."""

    def close(self, *, at_once: bool = False) -> None:
        """Frees everything."""


@dataclass(frozen=True)
class State:
    """How far a study is: what :func:`run_study` tells while it runs, and returns."""

    total: int
    done: int
    failed: int
    running: tuple[str, ...]
    """In words."""
    seconds_left: float | None
    """None until a run is finished."""
    ended: Record | None = None
    """The run that ended just now."""
    interrupted: bool = False
    errors: tuple[str, ...] = ()
    """Distinct errors of the failed runs, the most frequent first."""
    lost: str = ""
    """Why runs had to be left for the next call: nodes of the cluster were lost."""

    @property
    def waiting(self) -> int:
        """Runs that are neither finished nor failed."""
        return self.total - self.done - self.failed


def run_study(
    study: Study,
    out: str | Path,
    *,
    workers: int | Workers = 1,
    runs: str | Path | None = None,
    retry: bool = False,
    any_code: bool = False,
    plugin: str = "",
    tell: Callable[[State], None] = lambda state: None,
) -> State:
    """Runs what is missing of a study.

    out
        The folder of the store, ``study.db``. What it holds of this study is not run again; what was cut goes
        on where it was.
    workers
        How many processes on this machine, or the workers of a cluster, which stay open.
    runs
        The folder for checkpoints, which workers on other machines must see, too; ``runs`` in ``out`` unless
        told otherwise.
    retry, any_code
        Run again what failed; take runs as done that other versions of the code have finished.
    plugin
        A module or a .py file that workers import first: it registers tasks or mechanisms.

    Ctrl-C and SIGTERM let runs save themselves; the same call goes on from there. A second one ends at once.

    In a script, call it under ``if __name__ == "__main__":``: worker processes import the script, too.
    """
    out = Path(out)
    study = study.with_sizes()
    with Store(out / NAME, write=True) as store:
        store.begin(study.name, study.to_dict())
        made = LocalWorkers(workers) if isinstance(workers, int) else workers
        driver = _Driver(study, store, made, Path(runs or out / RUNS), tell, any_code, plugin)
        if retry:
            driver.forget_failures()
        with handled(driver.hear, *STOPS):
            try:
                return driver.run()
            finally:
                if isinstance(workers, int):
                    made.close(at_once=driver.signals > 1 or bool(driver.running))


class _Driver:
    def __init__(
        self,
        study: Study,
        store: Store,
        workers: Workers,
        runs: Path,
        tell: Callable[[State], None],
        any_code: bool,
        plugin: str,
    ) -> None:
        self.study, self.store, self.workers, self.runs, self.tell = study, store, workers, runs, tell
        self.any_code, self.plugin = any_code, plugin
        self.known = {record.key: record for record in store.records(study.name)}
        self.planned: dict[tuple[str, str, int, str], str] = {}
        """Keys of the runs of this study, by their place in it."""
        self.running: dict[str, float] = {}
        """When they began."""
        self.tries: dict[str, int] = {}
        self.nodes_lost: dict[str, int] = {}
        self.lost = ""
        self.spent: list[float] = []
        self.signals = 0

    def hear(self, number: int, frame: FrameType | None) -> None:
        """A signal: the first lets runs save themselves, the second ends everything."""
        self.signals += 1
        if self.signals > 1:
            raise KeyboardInterrupt

    def forget_failures(self) -> None:
        for record in list(self.known.values()):
            if record.status == FAILED:
                self.keep(replace(record, status=WAITING, error=""))

    def run(self) -> State:
        stopped = False
        while True:
            self.plan()
            if self.signals and not stopped:
                self.workers.stop()
                stopped = True
            if not stopped:
                self.submit()
            if not self.running:
                break
            self.tell(self.state())
            for key, outcome in self.workers.wait(0.5):
                self.finish(key, outcome)
        return self.state()

    def plan(self) -> None:
        """Writes down the runs that are decided by now; what is done already may decide more."""
        before = -1
        while before < len(self.planned):
            before = len(self.planned)
            mine = [self.known[key] for key in self.planned.values()]
            new = [run for run in self.study.runs(mine) if run.place not in self.planned]
            records = [self.record_of(run) for run in new]
            self.store.put(records)
            self.known |= {record.key: record for record in records}
            self.planned |= {run.place: record.key for run, record in zip(new, records, strict=True)}

    def record_of(self, run: Run) -> Record:
        """The row of a run: as another study finished it, or still to be run."""
        empty = planned(self.study, run, self.plugin)
        found = self.known.get(empty.key) or self.store.finished(empty.key)
        if found is None and self.any_code:
            found = next((old for old in reversed(self.known.values()) if _same(old, empty)), None)
        if found is None:
            return empty
        of_study = ("study", "group", "mechanism", "point", "sweep", "choose_on", "swept")
        return replace(found, **{name: getattr(empty, name) for name in of_study})

    def submit(self) -> None:
        free = self.workers.free()
        for key in self.planned.values():
            if free < 1:
                return
            record = self.known[key]
            left = record.status in (WAITING, CUT) and self.nodes_lost.get(key, 0) < _NODES
            if left and key not in self.running:
                self.keep(replace(record, status=RUNNING, attempts=record.attempts + 1))
                self.running[key] = time.monotonic()
                self.workers.submit(key, self.job(record))
                free -= 1

    def job(self, record: Record) -> dict[str, Any]:
        """What a worker is told."""
        folder = str((self.runs / record.key).absolute())
        return {"spec": dict(record.spec), "folder": folder, "code": record.code, "plugin": self.plugin}

    def finish(self, key: str, outcome: dict[str, Any]) -> None:
        """Writes what came of a run."""
        del self.running[key]
        record, status = self.known[key], outcome["status"]
        record = replace(record, wall=record.wall + outcome["wall"])
        if status == LOST:
            self.tries[key] = self.tries.get(key, 0) + 1
            over = self.tries[key] >= _TRIES and not self.signals
            status, error = (FAILED, f"{outcome['error']}, {_TRIES} times") if over else (CUT, "")
            record = replace(record, status=status, error=error)
        elif status == NODE_LOST:
            self.nodes_lost[key] = self.nodes_lost.get(key, 0) + 1
            self.lost = outcome["error"]
            record = replace(record, status=CUT)
        elif status == DONE:
            record = done(record, outcome)
            self.spent.append(record.wall)
        else:
            record = replace(record, status=status, error=outcome.get("error", ""))
        self.keep(replace(record, finished=datetime.now(UTC).isoformat(timespec="seconds")))
        if status == DONE:
            shutil.rmtree(self.runs / key, ignore_errors=True)
        self.tell(replace(self.state(), ended=self.known[key]))

    def keep(self, record: Record) -> None:
        self.store.put([record])
        self.known[record.key] = record

    def state(self) -> State:
        records = [self.known[key] for key in self.planned.values()]
        statuses = [record.status for record in records]
        errors = Counter(record.error for record in records if record.status == FAILED)
        done, failed, total = statuses.count(DONE), statuses.count(FAILED), len(self.study)
        left = None
        if self.spent:
            begun = sum(time.monotonic() - since for since in self.running.values())
            mean = sum(self.spent) / len(self.spent)
            left = max(0.0, (total - done - failed) * mean - begun) / max(
                1, min(self.workers.slots, total - done)
            )
        return State(
            total=total,
            done=done,
            failed=failed,
            running=tuple(words(self.known[key]) for key in self.running),
            seconds_left=left,
            interrupted=self.signals > 0,
            errors=tuple(error for error, _ in errors.most_common()),
            lost=self.lost if WAITING in statuses or CUT in statuses else "",
        )


def _same(old: Record, new: Record) -> bool:
    """Is it the same run, finished by other code, which measured what rates are chosen by here?"""
    measured = not new.choose_on or new.choose_on in old.validation_by
    return old.status == DONE and measured and (old.mechanism, old.spec) == (new.mechanism, new.spec)
