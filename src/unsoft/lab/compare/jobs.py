"""Jobs and their answers; what is done is kept at once, and found again the next time.

What takes time is run alone, one job after the other; the rest in as many processes as are allowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from unsoft.lab.bench.machine import Watch
from unsoft.lab.compare.processes import can_copy_itself, in_processes
from unsoft.lab.compare.store import Store, key_of
from unsoft.lab.report.look import in_order

Rows = list[Any]


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
    """Does it measure time?

    Then all cores are its own; the others are many small steps, which one thread does faster.
    """
    keep: bool = True
    """May the answer be kept?

    Not if it depends on something that can change unseen, such as a model on a hub.
    """
    prepare: Callable[[], object] | None = None
    """Called before anything is measured, if this job must run; an error of it ends the whole run."""
    required: bool = False
    """Does the command fail, in the end, if there is no answer?"""

    @property
    def title(self) -> str:
        return f"{self.name}: {self.mechanism}" if self.mechanism else self.name


@dataclass(frozen=True)
class Answer:
    """Rows of a job, or why there are none."""

    name: str
    mechanism: str
    rows: Rows
    seconds: float
    cached: bool = False
    """Was it measured by an earlier run, and kept?"""
    problem: str = ""
    measured: str = ""
    """Date and time (UTC) of the measurement."""
    disturbed: bool = False
    """Did other programs use the machine while time was taken? Such an answer is shown, but not kept."""


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

    def rows(self, name: str, mechanism: str = "") -> list[Any]:
        found = self._answers.get((name, mechanism))
        of = f" of {mechanism}" if mechanism else ""
        if found is None:
            raise Missing(f"the measurement '{name}'{of} did not run", (name, mechanism))
        if not found["rows"]:
            raise Missing(
                f"the measurement '{name}'{of} has no answer: {found['problem'] or 'nothing to measure'}"
            )
        return list(found["rows"])

    def get(self, name: str, mechanism: str = "") -> list[Any]:
        """The rows, or none."""
        try:
            return self.rows(name, mechanism)
        except Missing:
            return []

    def problem(self, name: str, mechanism: str = "") -> str:
        """Why a measurement has no rows; empty if it has some, or did not run."""
        found = self._answers.get((name, mechanism))
        return "" if found is None else str(found["problem"])

    def each(self, name: str) -> list[dict[str, Any]]:
        """The rows of all mechanisms that take part, with the mechanism's label in each."""
        return [{"mechanism": label, **row} for label in self.labels for row in self.get(name, label)]

    def matching(self, start: str) -> list[dict[str, Any]]:
        """The rows of all measurements about no single mechanism whose name starts with this."""
        return [
            row
            for (name, of), a in self._answers.items()
            if not of and name.startswith(start)
            for row in a["rows"]
        ]


Announce = Callable[[Job, int, float], None]
"""Called as each job that must run begins: the job, how many have an answer, and the seconds that are
probably left.
"""


def run(
    jobs: Sequence[Job],
    store: Store,
    announce: Announce = lambda *_: None,
    *,
    again: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    processes: int = 1,
) -> tuple[list[Answer], bool]:
    """The answers in the order of the jobs, and whether all were done: an
    interrupt ends the run, not what it has found.

    With ``again`` everything is measured, whatever the store holds. Failures are not kept, nor are times that
    were taken while other programs used the machine. Jobs that take time, or share something that is
    prepared, run in this process; the others before them in ``processes`` copies of it, the longest first.
    """
    keys = {id(job): key_of(job.question) for job in jobs}
    answers: dict[int, Answer] = {}
    for job in jobs:
        if job.keep and not again and (found := store.get(keys[id(job)])) is not None:
            kept = (found["rows"], found["seconds"], True)
            answers[id(job)] = Answer(job.name, job.mechanism, *kept, measured=found["measured"])
    missing = [job for job in jobs if id(job) not in answers]
    shared: list[Job] = []
    if processes > 1 and can_copy_itself():
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
            content = {"rows": answer.rows, "seconds": answer.seconds, "measured": answer.measured}
            store.put(keys[id(job)], content)

    finished = True
    try:
        for prepare in dict.fromkeys(job.prepare for job in missing if job.prepare is not None):
            prepare()
        if len(shared) > 1:
            begins(shared[0])
            started = processes
            for place, answer in in_processes([partial(_answer, job, clock) for job in shared], processes):
                ends(shared[place], answer)
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
    """One mechanism that cannot answer does not spoil the others."""
    watch, start = Watch(), clock()
    rows: Rows = []
    problem = ""
    try:
        with _threads(None if job.timed else 1):
            rows = job.compute()
    except (ValueError, RuntimeError) as error:
        problem = " ".join(str(error).split())[:300]
    seconds, now = clock() - start, datetime.now(UTC).isoformat(timespec="seconds")
    disturbed = job.timed and watch.disturbed(torch.get_num_threads())
    return Answer(job.name, job.mechanism, rows, seconds, False, problem, now, disturbed)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
