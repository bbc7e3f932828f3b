"""Language models: the records of the ``language`` studies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial

from unsoft.lab.compare.jobs import Job, Results
from unsoft.lab.compare.section import PRICE, Finding, Request, Section
from unsoft.lab.compare.sections.training import claim, judge, rows_of, where_and_when
from unsoft.lab.evidence import between
from unsoft.lab.records import LANGUAGE, command_for
from unsoft.lab.report.comparison import Part
from unsoft.lab.study.read import language_studies
from unsoft.lab.study.record import Record
from unsoft.lab.study.summary import summarise

NAME = "language"


def jobs(request: Request) -> list[Job]:
    content = hashlib.sha256(LANGUAGE.read_bytes()).hexdigest() if LANGUAGE.is_file() else ""
    work = partial(rows_of, LANGUAGE)
    return [Job(NAME, "", {"name": NAME, "content": content}, work, 0.1, is_record=True)]


def _records(results: Results) -> list[Record]:
    return [Record.from_row(row) for row in results.get(NAME)]


def parts(results: Results) -> Iterator[Part]:
    records = _records(results)
    if not records:
        yield Part("", "No language model is on record yet: unsoft study --default language trains them.")
        return
    rows = []
    for one in summarise(records):
        if one.mean is not None:
            gain = one.difference
            gains = (None, "reference") if gain is None else (gain.mean, between(gain.low, gain.high))
            longer = [one.harder[label].value for label in one.harder if label.startswith("length=")]
            last = longer[-1] if longer else None
            first = one.attention.get("first_token")
            trained = "undertrained" if one.is_undertrained else ""
            score = (one.group, one.mechanism, one.mean, between(one.low, one.high))
            rows.append((*score, *gains, one.seeds, last, first, trained))
    text = (
        "Bits per byte on held-out documents (lower is better), with 95 % confidence intervals (Student's t"
        " over seeds); differences to softmax are paired by seed, and positive is better. Undertrained: not"
        f" better than a trigram model. Made with: {command_for(records)}."
    )
    titles = ("size", "mechanism", "bits per byte ↓", "95 % CI", "over softmax ↑", "its 95 % CI", "seeds")
    columns = (*titles, "at 4× the length ↓", "share of the first token", "")
    yield Part.table("Trained on documentation and code", text, columns, rows)


def _judge(name: str, results: Results) -> Finding:
    return judge(name, _records(results))


def _recorded(results: Results) -> str:
    records = _records(results)
    return f"record shipped with unsoft: {where_and_when(records)}" if records else ""


SECTION = Section(
    name=NAME,
    order=91,
    group=PRICE,
    title="Language model",
    question="Does it help in a language model?",
    jobs=jobs,
    parts=parts,
    recorded=_recorded,
    columns=[],
    claims=[claim(name, _judge) for name in language_studies()],
)
