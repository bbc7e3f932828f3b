"""Runs jobs, one after the other; what is done is kept at once, and found again the next time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from unsoft.compare.job import Answer, Job
from unsoft.compare.store import Store, key_of

Announce = Callable[[Job, int, float], None]
"""Called before each job that must run: the job, its number, and the seconds that are probably left."""


def run(jobs: Sequence[Job], store: Store, announce: Announce = lambda *_: None) -> tuple[list[Answer], bool]:
    """The answers in the order of the jobs, and whether all were done: an interrupt ends the run, not what it has found."""
    keys = {id(job): key_of(job.question) for job in jobs}
    known = {id(job): found for job in jobs if (found := store.get(keys[id(job)])) is not None}
    todo = sum(job.expected for job in jobs if id(job) not in known)
    answers, spent, done = [], 0.0, 0.0
    for number, job in enumerate(jobs):
        if (found := known.get(id(job))) is not None:
            answers.append(
                Answer(job.name, job.mechanism, found["rows"], found["seconds"], True, found["problem"])
            )
            continue
        pace = spent / done if done else 1.0
        announce(job, number, (todo - done) * pace)
        start = time.perf_counter()
        try:
            with _threads(None if job.timed else 1):
                rows, problem = job.compute(), ""
        except KeyboardInterrupt:
            return answers, False
        except (
            ValueError,
            RuntimeError,
        ) as error:  # one mechanism that cannot answer does not spoil the others
            rows, problem = [], " ".join(str(error).split())[:300]
        seconds = time.perf_counter() - start
        spent, done = spent + seconds, done + job.expected
        store.put(keys[id(job)], {"rows": rows, "seconds": seconds, "problem": problem})
        answers.append(Answer(job.name, job.mechanism, rows, seconds, False, problem))
    return answers, True


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
