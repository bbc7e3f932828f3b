"""Runs a study: gives runs to workers and stores their results. It can be stopped and resumed at any
moment.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, Protocol

from unsoft.lab.study.plan import Run, Study
from unsoft.lab.study.record import CUT, DONE, FAILED, RUNNING, SHORT, WAITING, Record
from unsoft.lab.study.store import NAME, StudyStore
from unsoft.lab.study.worker import LOST, NODE_LOST, LocalWorkers, code_digest, plugin_digest
from unsoft.lab.tasks import task
from unsoft.lab.training.spec import Spec, check_memory
from unsoft.signals import STOPS, handled

RESULTS = 1
"""Version of the results. Increase it with a change that alters what any run finds: stored runs then no
longer count, and tests/lab/records compares new runs with the shipped records. Other changes of the code keep
it.
"""
DATA = {"digits": 2}
"""Versions of tasks whose data changed: only their stored runs no longer count."""
GEOMETRY = 2
"""Version of the distances between keys in models with rotary positions: 2 is before rotation. Stored runs
of magnitude and density in such models, which compared rotated keys, no longer count."""
_TRIES = 3
"""Attempts for a run whose worker dies."""
_NODES = 5
"""Attempts for a run whose node is lost; after that it is left for the next command. Without a limit a run
that takes its machine down would end every node of a cluster."""
_FROM_RESULT = (
    *("score", "validation", "metric", "higher_is_better", "chance", "known", "shortcut"),
    *("parameters", "steps", "seconds", "learned", "attention", "figures", "versions"),
)
RUNS = "runs"


class Workers(Protocol):
    """Performs runs: processes on this machine, or a cluster."""

    @property
    def slots(self) -> int:
        """Number of runs that can be in progress at a time."""

    def free(self) -> int:
        """Return how many more runs could start now; ConnectionError if there is no machine left."""

    def submit(self, key: str, job: dict[str, Any]) -> None:
        """Start a run."""

    def wait(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Return runs that ended with their outcomes."""

    def stop(self) -> None:
        """Ask all runs to save a checkpoint and end."""

    def close(self, *, at_once: bool = False) -> None:
        """Free everything."""


@dataclass(frozen=True)
class State:
    """Progress of a study: :func:`run_study` reports it while it runs, and returns it."""

    total: int
    done: int
    failed: int
    running: tuple[str, ...]
    """Labels of the runs in progress."""
    seconds_left: float | None
    """None until a run is finished."""
    ended: Record | None = None
    """The run that ended just now."""
    interrupted: bool = False
    errors: tuple[str, ...] = ()
    """Distinct errors of the failed runs, the most frequent first."""
    lost: str = ""
    """Reason why runs are left for the next call, if nodes of the cluster were lost."""
    other_code: int = 0
    """Finished runs that other code of the same results version made."""

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
    earlier: Iterable[Record] = (),
    tell: Callable[[State], None] = lambda state: None,
) -> State:
    """Run or resume a study.

    out
        The folder of the store, ``study.db``. Runs that it holds are not repeated; interrupted ones resume.
    workers
        The number of processes on this machine, or the workers of a cluster, which stay open.
    runs
        The folder for checkpoints, which workers on other machines must see, too; ``runs`` in ``out`` by
        default.
    retry, any_code
        Repeat failed runs; keep finished runs of other versions of the results, of torch or of the plug-in.
    plugin
        A module or a .py file that workers import first: it registers tasks or mechanisms.
    earlier
        Finished runs from elsewhere, such as those that come with the package: they are not repeated.

    Ctrl-C and SIGTERM let runs save a checkpoint; the same call resumes from there. A second one ends at
    once.

    In a script, call it under ``if __name__ == "__main__":``, because worker processes import the script,
    too.
    """
    out, earlier = Path(out), list(earlier)
    with StudyStore(out / NAME, write=True) as store:
        study = study.with_sizes(_known_steps(study.name, store, earlier))
        store.begin(study.name, study.to_dict())
        made = LocalWorkers(workers) if isinstance(workers, int) else workers
        driver = _Driver(study, store, made, Path(runs or out / RUNS), tell, any_code, plugin, earlier)
        if retry:
            driver.forget_failures()
        with handled(driver.handle, *STOPS):
            try:
                return driver.run()
            finally:
                if isinstance(workers, int):
                    made.close(at_once=driver.signals > 1 or bool(driver.running))


def _known_steps(name: str, store: StudyStore, earlier: Iterable[Record]) -> dict[tuple[str, str], int]:
    """Return steps that a budget in seconds had before, here or on another machine: measured again, they
    would be other runs."""
    steps = {
        (run.group, run.mechanism): run.steps
        for run in earlier
        if run.study == name and run.steps and not (run.swept and run.sweep == SHORT)
    }
    for group in (store.definition(name) or {"groups": ()})["groups"]:
        for variant in group["variants"]:
            if "steps" in variant["settings"]:
                steps[group["name"], variant["label"]] = variant["settings"]["steps"]
    return steps


def key_of(spec: dict[str, Any], plugin: str = "") -> str:
    """Return forty digits that identify a run: its spec, the results version, the plug-in and torch's
    version.

    The code is not part of it, so that stored runs stay valid when code moves.

    >>> key_of({"seed": 0}) == key_of({"seed": 0}), key_of({"seed": 0}) == key_of({"seed": 1})
    (True, False)
    """
    import torch

    content = {"spec": spec, "results": RESULTS, "plugin": plugin_digest(plugin), "torch": torch.__version__}
    if (version := DATA.get(spec.get("task", ""))) is not None:
        content["data"] = version
    if any(name in str(spec.get("mechanism")) for name in ("magnitude", "density")) and _rotates(spec):
        content["geometry"] = GEOMETRY
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:40]


def _rotates(spec: dict[str, Any]) -> bool:
    rotary = spec.get("rotary")
    return bool(task(spec["task"], **spec.get("knobs", {})).setup.positions if rotary is None else rotary)


@dataclass
class _Driver:
    study: Study
    store: StudyStore
    workers: Workers
    runs: Path
    tell: Callable[[State], None]
    any_code: bool
    plugin: str
    finished_before: Iterable[Record]

    def __post_init__(self) -> None:
        self.code = code_digest(self.plugin)
        self.known = {record.key: record for record in self.store.records(self.study.name)}
        self.earlier = {record.key: record for record in self.finished_before if record.status == DONE}
        self.planned: dict[tuple[str, str, int, str], str] = {}
        """Keys of the runs of this study, by their position in it, in the order in which they start."""
        self.running: dict[str, float] = {}
        """Start times."""
        self.tries: Counter[str] = Counter()
        self.nodes_lost: Counter[str] = Counter()
        self.lost = ""
        self.ended: list[Record] = []
        """Runs that were finished in this session, for the time that others will take."""
        self.signals = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first lets runs save a checkpoint, the second ends everything."""
        self.signals += 1
        if self.signals > 1:
            raise KeyboardInterrupt

    def forget_failures(self) -> None:
        for record in list(self.known.values()):
            if record.status == FAILED:
                self.keep(replace(record, status=WAITING, error=""))

    def run(self) -> State:
        stopped = False
        self.plan()
        self.prepare()
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

    def prepare(self) -> None:
        """Prepare the tasks of runs that are left. ValueError, before anything runs, if their data cannot be
        used, or if as many runs as there are workers do not fit in the memory of this machine.
        """
        left = self.left()
        if isinstance(self.workers, LocalWorkers):
            specs = {(record.group, record.mechanism): record.spec for record in left}
            for spec in specs.values():
                check_memory(Spec.from_dict(spec), min(self.workers.slots, len(left)))
        for group in self.study.groups:
            if any(record.group == group.name for record in left):
                task(group.task, **group.knobs).prepare()

    def left(self) -> list[Record]:
        """Return the planned runs that are neither finished nor failed."""
        return [self.known[key] for key in self.planned.values() if self.known[key].status in (WAITING, CUT)]

    def plan(self) -> None:
        """Store the runs that are decided by now; finished runs may decide more."""
        before = -1
        while before < len(self.planned):
            before = len(self.planned)
            mine = [self.known[key] for key in self.planned.values()]
            runs = list(self.study.runs(mine))
            new = [run for run in runs if run.position not in self.planned]
            records = [self.record_of(run) for run in new]
            self.store.put(records)
            self.known |= {record.key: record for record in records}
            keys = {run.position: record.key for run, record in zip(new, records, strict=True)}
            # In the order of the study: what a finished sweep decides may come before the next sweep.
            keys |= self.planned
            self.planned = {run.position: keys[run.position] for run in runs}

    def record_of(self, run: Run) -> Record:
        """Return the record of a run: as this or another study stored it, or a new one."""
        spec = run.spec.to_dict()
        group, mechanism, seed, point = run.position
        key = key_of(spec, self.plugin)
        candidates = [self.known.get(key), self.store.finished(key), self.earlier.get(key)]
        if self.any_code:
            candidates += [
                old
                for old in reversed(self.known.values())
                if old.status == DONE and (old.mechanism, old.spec) == (mechanism, spec)
            ]
        stored = next((old for old in candidates if old is not None and _is_measured(old, run)), None)
        code = self.code if stored is None or stored.status != DONE else stored.code
        # With the spec, since shipped records do without.
        here: dict[str, Any] = {
            "study": self.study.name,
            "group": group,
            "mechanism": mechanism,
            "spec": spec,
        }
        here |= {"point": point, "sweep": self.study.sweep, "choose_on": run.group.choose_on}
        here |= {"swept": run.swept, "code": code}
        if stored is not None:
            return replace(stored, **here)
        lr = run.point["lr"]
        return Record(task=run.group.task, base=run.variant.mechanism, seed=seed, lr=lr, key=key, **here)

    def submit(self) -> None:
        free = self.workers.free()
        for key in self.planned.values():
            if free < 1:
                return
            record = self.known[key]
            left = record.status in (WAITING, CUT) and self.nodes_lost[key] < _NODES
            if left and key not in self.running:
                self.keep(replace(record, status=RUNNING, attempts=record.attempts + 1))
                self.running[key] = time.monotonic()
                self.workers.submit(key, self.job(record))
                free -= 1

    def job(self, record: Record) -> dict[str, Any]:
        """Return what a worker needs to know."""
        folder = str((self.runs / record.key).absolute())
        return {"spec": dict(record.spec), "folder": folder, "code": record.code, "plugin": self.plugin}

    def finish(self, key: str, outcome: dict[str, Any]) -> None:
        """Store the outcome of a run."""
        del self.running[key]
        record, status = self.known[key], outcome["status"]
        record = replace(record, wall=record.wall + outcome["wall"])
        if status == LOST:
            self.tries[key] += 1
            over = self.tries[key] >= _TRIES and not self.signals
            status, error = (FAILED, f"{outcome['error']}, {_TRIES} times") if over else (CUT, "")
            record = replace(record, status=status, error=error)
        elif status == NODE_LOST:
            self.nodes_lost[key] += 1
            self.lost = outcome["error"]
            record = replace(record, status=CUT)
        elif status == DONE:
            record = _finished(record, outcome)
            self.ended.append(record)
        else:
            record = replace(record, status=status, error=outcome.get("error", ""))
        self.keep(replace(record, finished=datetime.now(UTC).isoformat(timespec="seconds")))
        if status == DONE:
            shutil.rmtree(self.runs / key, ignore_errors=True)
        self.tell(replace(self.state(), ended=self.known[key]))

    def keep(self, record: Record) -> None:
        self.store.put([record])
        self.known[record.key] = record

    def seconds_left(self, records: list[Record], total: int) -> float:
        """Return the time until all runs are done, by those that ended in this session."""
        seconds = 0.0
        for record in records:
            if record.status not in (DONE, FAILED):
                begun = time.monotonic() - self.running.get(record.key, time.monotonic())
                seconds += max(0.0, self.expected_seconds(record) - begun)
        # Runs that are not decided yet are of the full length; those that choose a rate come first.
        longest = max(records, key=lambda record: int(record.spec["steps"]))
        seconds += (total - len(records)) * self.expected_seconds(longest)
        unfinished = total - sum(record.status in (DONE, FAILED) for record in records)
        return seconds / max(1, min(self.workers.slots, unfinished))

    def expected_seconds(self, record: Record) -> float:
        """Return the time of a run, by those that ended: of its mechanism, else of its group, else of all.

        The final tests take as long after a short run as after a long one.
        """
        for same in (("group", "mechanism"), ("group",), ()):
            wanted = [getattr(record, name) for name in same]
            if like := [one for one in self.ended if [getattr(one, name) for name in same] == wanted]:
                break
        # The training time of a resumed run is that of its last session only.
        training = [one.seconds or 0.0 if one.attempts == 1 else one.wall for one in like]
        tests = fmean(one.wall - seconds for one, seconds in zip(like, training, strict=True))
        return tests + int(record.spec["steps"]) * sum(training) / sum(one.steps or 1 for one in like)

    def state(self) -> State:
        records = [self.known[key] for key in self.planned.values()]
        statuses = [record.status for record in records]
        errors = Counter(record.error for record in records if record.status == FAILED)
        done, failed, total = statuses.count(DONE), statuses.count(FAILED), self.study.total(records)
        return State(
            total=total,
            done=done,
            failed=failed,
            running=tuple(self.known[key].label for key in self.running),
            seconds_left=self.seconds_left(records, total) if self.ended else None,
            interrupted=self.signals > 0,
            errors=tuple(error for error, _ in errors.most_common()),
            lost=self.lost if WAITING in statuses or CUT in statuses else "",
            other_code=sum(record.status == DONE and record.code != self.code for record in records),
        )


def _is_measured(record: Record, run: Run) -> bool:
    """Return False for a finished record without the validation score by which rates are chosen here."""
    choose_on = run.group.choose_on
    return record.status != DONE or not choose_on or choose_on in record.validation_by


def _finished(record: Record, outcome: dict[str, Any]) -> Record:
    """Return the record with the result of its run."""
    result = outcome["result"]
    history, best = result["history"], max if result["higher_is_better"] else min
    curve = [[row["step"], row["eval_score"]] for row in history if "eval_score" in row]
    tests = {f"{result['difficulty']}={test['value']}": test for test in result["score_by"]}
    return replace(
        record,
        status=DONE,
        error="",
        best_validation=best(score for _, score in curve),
        curve=curve,
        losses=[[row["step"], row["loss"]] for row in history if "loss" in row],
        harder={label: test["score"] for label, test in tests.items()} | dict(result["further"]),
        validation_by={label: test["validation"] for label, test in tests.items()},
        machine=outcome["machine"],
        seconds_per_step=result["seconds"] / result["steps"] if record.attempts == 1 else None,
        **{name: result[name] for name in _FROM_RESULT},
    )
