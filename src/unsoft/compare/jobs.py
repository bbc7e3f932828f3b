"""Jobs, run one after the other, and their answers; what is done is
kept at once, and found again the next time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from unsoft.bench.record import load
from unsoft.compare.store import Store, key_of
from unsoft.report.look import in_order

Rows = list[Any]
_NOISE = 0.25
"""Cores that an idle system uses by itself."""


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
"""Called before each job that must run: the job, its number, and the seconds that are probably left."""


def run(
    jobs: Sequence[Job],
    store: Store,
    announce: Announce = lambda *_: None,
    *,
    again: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Answer], bool]:
    """The answers in the order of the jobs, and whether all were done: an
    interrupt ends the run, not what it has found.

    With ``again`` everything is measured, whatever the store holds. Failures are not kept, nor are times that
    were taken while other programs used the machine.
    """
    keys = {id(job): key_of(job.question) for job in jobs}
    asked = [] if again else [job for job in jobs if job.keep]
    known = {id(job): found for job in asked if (found := store.get(keys[id(job)])) is not None}
    missing = [job for job in jobs if id(job) not in known]
    todo = sum(job.expected for job in missing)
    answers: list[Answer] = []
    spent, done = 0.0, 0.0
    try:
        for prepare in dict.fromkeys(job.prepare for job in missing if job.prepare is not None):
            prepare()
        for number, job in enumerate(jobs):
            if (found := known.get(id(job))) is not None:
                kept = (found["rows"], found["seconds"], True)
                answers.append(Answer(job.name, job.mechanism, *kept, measured=found["measured"]))
                continue
            pace = spent / done if done else 1.0
            announce(job, number, (todo - done) * pace)
            answer = _answer(job, clock)
            spent, done = spent + answer.seconds, done + job.expected
            answers.append(answer)
            if job.keep and not answer.problem and not answer.disturbed:
                content = {"rows": answer.rows, "seconds": answer.seconds, "measured": answer.measured}
                store.put(keys[id(job)], content)
    except KeyboardInterrupt:
        return answers, False
    return answers, True


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


class Watch:
    """Did other programs disturb what is timed? The load average
    cannot tell, since it counts our own work too.

    So the processor time of the whole machine is compared with that of this process, from when the watch is
    made.
    """

    def __init__(self) -> None:
        self._start = (time.perf_counter(), _all_seconds(), _own_seconds())

    def others(self) -> float | None:
        """How many cores other programs have used since then; None where the system does not tell."""
        wall, everyone, own = self._start
        now = _all_seconds()
        if everyone is None or now is None:
            return None
        return max(0.0, (now - everyone) - (_own_seconds() - own)) / max(time.perf_counter() - wall, 1e-9)

    def disturbed(self, threads: int) -> bool:
        """Did they take cores that ``threads`` threads of ours needed?

        Without an answer, the load average decides.
        """
        others, cores = self.others(), len(_cores())
        if others is None:
            waiting = load()
            return waiting is not None and waiting > cores + 0.5
        return others > cores - min(threads, cores) + _NOISE


def _cores() -> set[int]:
    """Those that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _all_seconds() -> float | None:
    """Seconds in which our cores were not idle, since the system started."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    names, total = {f"cpu{core}" for core in _cores()}, 0
    for line in lines:
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _idle, _waiting, *more = map(int, ticks[:8])
            total += user + nice + system + sum(more)
    return total / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Of this process and of those that it started and waited for."""
    return sum(os.times()[:4])
