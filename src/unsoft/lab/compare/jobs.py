"""Jobs, their answers, and the run that keeps every answer in the store as soon as it is measured.

Jobs that measure time run alone, one after the other; the rest in as many processes as are allowed.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from unsoft.lab.bench.machine import Watch, threads
from unsoft.lab.compare.store import AnswerStore, key_of
from unsoft.lab.evidence import Estimate, paired_ratio, t_interval
from unsoft.lab.report.look import answered_columns, in_order
from unsoft.notebook import data_frame, html_table

Rows = list[Any]
RowIterator = Iterator[dict[str, Any]]
_KEPT = ("rows", "seconds", "measured")
"""Fields of an answer that the store keeps."""
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One measurement.

    ``question`` is everything that the answer depends on; ``expected`` are seconds on an ordinary machine.
    """

    name: str
    mechanism: str
    """The label of the mechanism, empty if it is about none or about all."""
    question: Mapping[str, Any]
    compute: Callable[[], Rows]
    expected: float
    timed: bool = False
    """True if it measures time: it then runs alone with all cores, other jobs with a single thread."""
    keep: bool = True
    """False if the answer depends on something that can change unseen, such as a model on a hub."""
    prepare: Callable[[], object] | None = None
    """Called before anything is measured, if this job must run; an error of it ends the whole run."""
    required: bool = False
    """True if the command must fail, in the end, without an answer."""
    is_record: bool = False
    """True if it reads a record instead of measuring."""

    @property
    def title(self) -> str:
        return f"{self.name}: {self.mechanism}" if self.mechanism else self.name


def record_job(name: str, files: Sequence[Path], read: Callable[[], Rows], **options: Any) -> Job:
    """Return the job that reads a record from files, whose content is its question."""
    content = b"\0".join(file.read_bytes() for file in files if file.is_file())
    question = {"name": name, "content": hashlib.sha256(content).hexdigest()}
    return Job(name, "", question, read, 0.1, is_record=True, **options)


@dataclass(frozen=True)
class Answer:
    """Rows of a job, or why there are none."""

    name: str
    mechanism: str
    rows: Rows
    seconds: float
    cached: bool = False
    """True if an earlier run measured it."""
    problem: str = ""
    measured: str = ""
    """Date and time (UTC) of the measurement."""
    disturbed: bool = False
    """True if other programs used the machine while time was taken: it is shown, but not kept."""
    is_record: bool = False


class Missing(LookupError):
    """A measurement that did not run, or had no answer; the message says why.

    ``wanted`` is its name and mechanism if it has not been asked for yet.
    """

    def __init__(self, why: str, wanted: tuple[str, str] | None = None) -> None:
        super().__init__(why)
        self.wanted = wanted


class Results:
    """The answers in a record, by name.

    ``rows("focus", "cog")`` are plain dictionaries; absent ones raise :class:`Missing`.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = record
        subjects = record["subjects"]
        self.labels = in_order([s["label"] for s in subjects], [s["label"] for s in subjects if s["own"]])
        self._answers = {(a["name"], a["mechanism"]): a for a in record["answers"]}

    def rows(self, name: str, mechanism: str = "", **where: Any) -> list[Any]:
        """Return the rows of a measurement whose columns have the values ``where``."""
        answer = self._answers.get((name, mechanism))
        of = f" of {mechanism}" if mechanism else ""
        if answer is None:
            raise Missing(f"the measurement '{name}'{of} did not run", (name, mechanism))
        if not answer["rows"]:
            why = answer["problem"] or "nothing to measure"
            raise Missing(f"the measurement '{name}'{of} has no answer: {why}")
        return matching(answer["rows"], **where)

    def get(self, name: str, mechanism: str = "", **where: Any) -> list[Any]:
        """Return the rows, or none if the measurement has no answer."""
        try:
            return self.rows(name, mechanism, **where)
        except Missing:
            return []

    def problem(self, name: str, mechanism: str = "") -> str:
        """Return why a measurement has no rows; empty if it has some, or did not run."""
        answer = self._answers.get((name, mechanism))
        return "" if answer is None else str(answer["problem"])

    def each(self, name: str, **where: Any) -> list[dict[str, Any]]:
        """Return the rows of all compared mechanisms, with the mechanism's label in each."""
        own = ((label, row) for label in self.labels for row in self.get(name, label, **where))
        return [{"mechanism": label, **row} for label, row in own]

    def scores(self) -> list[dict[str, Any]]:
        """Return the scoreboard as rows: mechanism, then the number of each column that has one."""
        shown = [column["name"] for column in answered_columns(self.record)]
        return [
            {"mechanism": row["mechanism"]} | {name: row["cells"][name]["value"] for name in shown}
            for row in self.record["scoreboard"]
        ]

    def to_pandas(self) -> Any:
        """Return the scoreboard as a DataFrame."""
        return data_frame(self.scores())

    def _repr_html_(self) -> str:
        return html_table(self.scores())

    def starting_with(self, start: str) -> list[dict[str, Any]]:
        """Return the rows of all measurements about no single mechanism whose name starts with this."""
        answers = [a for (name, of), a in self._answers.items() if not of and name.startswith(start)]
        return [row for answer in answers for row in answer["rows"]]


def matching(rows: Sequence[Any], **where: Any) -> list[Any]:
    """Return the rows whose columns have the values ``where``.

    >>> matching([{"width": 4, "S": 0.1}, {"width": 8, "S": 0.2}], width=8)
    [{'width': 8, 'S': 0.2}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in where.items())]


def mean_of(rows: Sequence[Any], field: str, **where: Any) -> Estimate:
    """Return the mean of a column over the rows with the values ``where``, with its confidence interval.

    >>> print(mean_of([{"width": 4, "S": 0.1}, {"width": 8, "S": 0.2}], "S", width=8))
    0.2
    """
    return t_interval([row[field] for row in matching(rows, **where)])


def ratio_of(rows: Sequence[Any], field: str, first: str, second: str, **where: Any) -> Estimate:
    """Return how many times the column of one mechanism is that of another, paired by draw.

    >>> print(ratio_of([{"mechanism": "a", "S": 4.0}, {"mechanism": "b", "S": 2.0}], "S", "a", "b"))
    2
    """
    mine, theirs = ([row[field] for row in matching(rows, mechanism=x, **where)] for x in (first, second))
    return paired_ratio(mine, theirs)


Announce = Callable[[Job, int, float], None]
"""Called as each job that must run begins: the job, how many have an answer, and the seconds that are
probably left.
"""


def run(
    jobs: Sequence[Job],
    store: AnswerStore,
    announce: Announce = lambda *_: None,
    *,
    again: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    processes: int = 1,
) -> tuple[list[Answer], bool]:
    """Return the answers in the order of the jobs, and whether the run was completed.

    An interrupt ends the run but keeps its answers. With ``again`` everything is measured, whatever the store
    holds. Failures are not kept, nor are times that were taken while other programs used the machine. Jobs
    that measure time, or share something that is prepared, run in this process; the others before them in
    ``processes`` copies of it, the longest first.
    """
    keys = {id(job): key_of(job.question) for job in jobs}
    answers: dict[int, Answer] = {}
    for job in jobs:
        kept = store.get(keys[id(job)]) if job.keep and not again else None
        if kept is not None and kept.keys() >= set(_KEPT):
            content = {name: kept[name] for name in _KEPT} | {"cached": True, "is_record": job.is_record}
            answers[id(job)] = Answer(job.name, job.mechanism, **content)
    missing = [job for job in jobs if id(job) not in answers]
    shared: list[Job] = []
    if processes > 1 and can_fork():
        shared = [job for job in missing if not job.timed and job.prepare is None]
        shared.sort(key=lambda job: -job.expected)
    spent, done = 0.0, 0.0

    def begins(job: Job) -> None:
        left = {one: job for job in missing if (one := id(job)) not in answers}
        soon = sum(job.expected for job in shared if id(job) in left)
        alone = sum(job.expected for job in left.values()) - soon
        announce(job, len(answers), (soon / processes + alone) * (spent / done if done else 1.0))

    def ends(job: Job, answer: Answer) -> None:
        nonlocal spent, done
        spent, done = spent + answer.seconds, done + job.expected
        answers[id(job)] = answer
        if job.keep and not answer.problem and not answer.disturbed:
            store.put(keys[id(job)], {name: getattr(answer, name) for name in _KEPT})

    finished = True
    try:
        for prepare in dict.fromkeys(job.prepare for job in missing if job.prepare is not None):
            prepare()
        if len(shared) > 1:
            begins(shared[0])
            started = processes
            for index, answer in in_processes([partial(_answer, job, clock) for job in shared], processes):
                ends(shared[index], answer)
                if started < len(shared):
                    begins(shared[started])
                started += 1
        for job in missing:
            if id(job) not in answers:
                begins(job)
                ends(job, _answer(job, clock))
    except KeyboardInterrupt:
        finished = False
    return [answers[id(job)] for job in jobs if id(job) in answers], finished


def _answer(job: Job, clock: Callable[[], float]) -> Answer:
    """Run one job; an error becomes the problem of its answer, so that other jobs go on."""
    watch, start = Watch(), clock()
    rows: Rows = []
    problem = ""
    try:
        with threads(None if job.timed else 1):
            rows = job.compute()
    except (ValueError, RuntimeError) as error:
        problem = " ".join(str(error).split())[:300]
    seconds, now = clock() - start, datetime.now(UTC).isoformat(timespec="seconds")
    disturbed = job.timed and watch.disturbed(torch.get_num_threads())
    more: dict[str, Any] = {"measured": now, "disturbed": disturbed, "is_record": job.is_record}
    return Answer(job.name, job.mechanism, rows, seconds, problem=problem, **more)


_work: Sequence[Callable[[], Any]] = ()
"""Functions that forked processes inherit, so that they need not be picklable."""


def can_fork() -> bool:
    """Return True on Linux while no other thread runs, whose locks a copy of the process would keep."""
    return sys.platform == "linux" and threading.active_count() == 1


def in_processes(work: Sequence[Callable[[], T]], count: int) -> Iterator[tuple[int, T]]:
    """Call the functions in ``count`` copies of this process; yield the index and result of each as they end.

    If a copy dies, nothing more comes: what is missing is left to the caller.

    >>> sorted(in_processes([lambda: "a", lambda: "b"], 2)) if can_fork() else [(0, "a"), (1, "b")]
    [(0, 'a'), (1, 'b')]
    """
    global _work
    _work = work
    # Ctrl-C reaches all processes of a terminal; only the first one reports it.
    end_at_once: dict[str, Any] = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), **end_at_once)
    try:
        indices = {pool.submit(_call, index): index for index in range(len(work))}
        for done in as_completed(indices):
            yield indices[done], done.result()
    except BrokenProcessPool:
        return
    finally:
        pool.shutdown(cancel_futures=True)
        _work = ()


def _call(index: int) -> Any:
    return _work[index]()
