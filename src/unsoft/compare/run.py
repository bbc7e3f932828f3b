"""Runs jobs, one after the other; what is done is kept at once, and found again the next time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import torch

from unsoft.compare.busy import Watch
from unsoft.compare.job import Answer, Job
from unsoft.compare.store import Store, key_of

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
    """The answers in the order of the jobs, and whether all were done: an interrupt ends the run, not what it has found.

    With ``again`` everything is measured, whatever the store holds. Failures are not kept, nor are times that were taken while other
    programs used the machine.
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
                answers.append(
                    Answer(
                        job.name,
                        job.mechanism,
                        found["rows"],
                        found["seconds"],
                        True,
                        measured=found["measured"],
                    )
                )
                continue
            pace = spent / done if done else 1.0
            announce(job, number, (todo - done) * pace)
            start = clock()
            answer = _answer(job, clock)
            spent, done = spent + clock() - start, done + job.expected
            answers.append(answer)
            if job.keep and not answer.problem and not answer.disturbed:
                kept = {"rows": answer.rows, "seconds": answer.seconds, "measured": answer.measured}
                store.put(keys[id(job)], kept)
    except KeyboardInterrupt:
        return answers, False
    return answers, True


def _answer(job: Job, clock: Callable[[], float]) -> Answer:
    """One mechanism that cannot answer does not spoil the others."""
    watch, start = Watch(), clock()
    rows, problem = [], ""
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
