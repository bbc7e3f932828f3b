"""Language models: the records of the ``language`` studies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from unsoft.lab.compare.jobs import Job, Results, record_job
from unsoft.lab.compare.section import PRICE, Finding, Request, Section
from unsoft.lab.compare.sections import training
from unsoft.lab.compare.sections.training import SCORES, records_of, score_cells
from unsoft.lab.records import LANGUAGE, command_for
from unsoft.lab.report.comparison import Part
from unsoft.lab.study.read import language_studies
from unsoft.lab.study.summary import summarise

NAME = "language"


_records = partial(records_of, name=NAME)


def _recorded(results: Results) -> str:
    records = _records(results)
    return f"record shipped with unsoft: {training.where_and_when(records)}" if records else ""


_ASKED = "Does it help in a language model?"
SECTION = Section(order=91, group=PRICE, title="Language model", question=_ASKED, recorded=_recorded)


@SECTION.jobs
def jobs(request: Request) -> list[Job]:
    return [record_job(NAME, [LANGUAGE], partial(training.rows_of, LANGUAGE))]


@SECTION.parts
def parts(results: Results) -> Iterator[Part]:
    records = _records(results)
    if not records:
        yield Part("", "No language model is on record yet: unsoft study --default language trains them.")
        return
    rows = []
    for one in summarise(records):
        if one.mean is not None:
            longer = [one.harder[label].value for label in one.harder if label.startswith("length=")]
            trained = "undertrained" if one.is_undertrained else ""
            more = (longer[-1] if longer else None, one.attention.get("first_token"), trained)
            rows.append((one.group, *score_cells(one), *more))
    text = (
        "Bits per byte on held-out documents (lower is better), with 95 % confidence intervals (Student's t"
        " over seeds); differences to softmax are paired by seed, and positive is better. Undertrained: not"
        f" better than a trigram model. Made with: {command_for(records)}."
    )
    better = {"score": "bits per byte ↓", "over softmax": "over softmax ↑"}
    titles = ("size", *(better.get(title, title) for title in SCORES))
    columns = (*titles, "at 4× the length ↓", "share of the first token", "")
    yield Part.table("Trained on documentation and code", text, columns, rows)


def _judge(name: str, results: Results) -> Finding:
    return training.judge(name, _records(results))


SECTION.claims += [training.claim(name, _judge) for name in language_studies()]
