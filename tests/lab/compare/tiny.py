"""A comparison so small that it takes seconds, run through the real pipeline."""

from unsoft.lab.compare.candidate import Candidate
from unsoft.lab.compare.jobs import Answer, run
from unsoft.lab.compare.output import record
from unsoft.lab.compare.plan import plan
from unsoft.lab.compare.section import ComparisonLevel, Request
from unsoft.lab.compare.store import AnswerStore

TINY = ComparisonLevel(
    name="tiny",
    mechanisms=(),
    keys=256,
    rows=4,
    depth=3,
    seeds=1,
    lengths=(64, 128),
    rounds=1,
    seconds=0.0,
    geometries=32,
    draws=2,
)


def answers_of(candidates: list[Candidate], folder, only=()) -> list[Answer]:
    answers, finished = run(plan(Request(candidates, TINY), only), AnswerStore(folder))
    assert finished
    return answers


def record_of(candidates: list[Candidate], folder, only=()) -> dict:
    answers = answers_of(candidates, folder, only)
    return record(Request(candidates, TINY), answers, only=only, finished=True, command="unsoft compare")
