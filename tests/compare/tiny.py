"""A comparison so small that it takes seconds, run through the real pipeline."""

from unsoft.compare.job import Answer
from unsoft.compare.level import Level
from unsoft.compare.plan import plan
from unsoft.compare.record import record
from unsoft.compare.run import run
from unsoft.compare.store import Store
from unsoft.compare.subject import Subject

TINY = Level("tiny", (), 256, 4, 3, 1, (64, 128), 1, 0.0, 32)


def answers_of(subjects: list[Subject], folder, only=()) -> list[Answer]:
    found, finished = run(plan(subjects, TINY, only), Store(folder))
    assert finished
    return found


def record_of(subjects: list[Subject], folder, only=()) -> dict:
    return record(subjects, answers_of(subjects, folder, only), TINY, finished=True, command="unsoft compare")
