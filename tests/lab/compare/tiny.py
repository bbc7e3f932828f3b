"""A comparison so small that it takes seconds, run through the real pipeline."""

from unsoft.lab.compare.jobs import Answer, run
from unsoft.lab.compare.level import Level
from unsoft.lab.compare.output import record
from unsoft.lab.compare.section import Request, plan
from unsoft.lab.compare.store import Store
from unsoft.lab.compare.subject import Subject

TINY = Level("tiny", (), 256, 4, 3, 1, (64, 128), 1, 0.0, 32, 2)


def answers_of(subjects: list[Subject], folder, only=()) -> list[Answer]:
    found, finished = run(plan(Request(subjects, TINY), only), Store(folder))
    assert finished
    return found


def record_of(subjects: list[Subject], folder, only=()) -> dict:
    return record(subjects, answers_of(subjects, folder, only), TINY, finished=True, command="unsoft compare")
