"""What a section of a comparison consists of, and where its files
are found: each file of ``sections`` is one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unsoft.lab.compare import sections as folder
from unsoft.lab.compare.claim import KINDS, Claim
from unsoft.lab.compare.column import Column
from unsoft.lab.compare.jobs import Job, Results, Rows
from unsoft.lab.compare.level import Level
from unsoft.lab.compare.store import outside_digest
from unsoft.lab.compare.subject import Subject
from unsoft.lab.evidence import VERDICTS

if TYPE_CHECKING:
    from unsoft.lab.report.comparison.page import Part
    from unsoft.lab.report.control import Control
    from unsoft.lab.report.figure import Figure

CLAIMS = "claims"
"""Stands for the facts of all sections, as the name of a section to measure."""
REFERENCES = ("softmax", "cog", "relu2", "identity", "gpam", "linear-relu", "magnitude")
"""Measured in any case, since claims are about them; but no time is taken of them."""


@dataclass(frozen=True)
class Request:
    """What the user wants compared."""

    subjects: Sequence[Subject]
    level: Level
    model: str | None = None
    study: str | None = None
    """A file with records of trained models, in place of those that come with the package."""
    verdicts: str | None = None
    """A file with verdicts of interventions inside a model, before those that come with the package."""

    @property
    def everyone(self) -> list[Subject]:
        """The mechanisms of the user, and those that claims are about."""
        known = {subject.label for subject in self.subjects}
        return [*self.subjects, *(Subject(name, name) for name in REFERENCES if name not in known)]


@dataclass(frozen=True)
class Section:
    """One question about mechanisms: how it is measured, drawn, scored, and which claims it decides.

    ``order`` is its place among the others. Everything else is optional. ``jobs`` measure the mechanisms of a
    request, ``facts`` what claims need besides. ``figures`` and ``parts`` are what the page shows; without
    either it has no place there.
    """

    name: str
    order: int
    title: str = ""
    """In the page's list of sections."""
    question: str = ""
    """The heading of the section."""
    about: str = ""
    """What to know before looking at the figures."""
    jobs: Callable[[Request], list[Job]] | None = None
    facts: Callable[[Level], list[Job]] | None = None
    figures: Callable[[Results], Iterable[Figure]] | None = None
    parts: Callable[[Results], Iterable[Part]] | None = None
    controls: Sequence[Control] = ()
    columns: Sequence[Column] = ()
    claims: Sequence[Claim] = ()
    needs: str = ""
    """The field of a request (and of its record) without which there is nothing to measure or to show."""

    def view(self, results: Results) -> dict[str, Any] | None:
        """What the page shows; None for a section without a place there, or
        of which nothing was measured.
        """
        figures = list(self.figures(results)) if self.figures else []
        parts = list(self.parts(results)) if self.parts else []
        if not figures and not parts:
            return None
        texts = {"name": self.name, "title": self.title, "question": self.question, "about": self.about}
        return texts | {"controls": self.controls, "figures": figures, "parts": parts}


def sections(record: Mapping[str, Any] | None = None) -> list[Section]:
    """All there are, in order; or those that have what they need in a record."""
    found = []
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        found.append(importlib.import_module(module.name).SECTION)
    if record is not None:
        found = [section for section in found if not section.needs or record.get(section.needs)]
    return sorted(found, key=lambda section: (section.order, section.name))


def plan(request: Request, only: Sequence[str] = ()) -> list[Job]:
    """The jobs of the wanted sections, all unless told otherwise; first
    those that must prepare something, facts last.
    """
    jobs: list[Job] = []
    facts: list[Job] = []
    for section in sections(vars(request)):
        wanted = not only or section.name in only
        if wanted and section.jobs:
            jobs += _with_code(section.jobs, section.jobs(request))
        if (wanted or CLAIMS in only) and section.facts:
            facts += _with_code(section.facts, section.facts(request.level))
    return sorted(jobs, key=lambda job: job.prepare is None) + facts


def job(
    name: str,
    subject: Subject | None,
    compute: Callable[[], Rows],
    expected: float,
    sizes: Mapping[str, Any] | None = None,
    *,
    timed: bool = False,
) -> Job:
    """A measurement of one mechanism, or of none; ``sizes`` are what its answer depends on besides."""
    asked = {"name": name, **(sizes or {})}
    if subject is not None:
        asked["mechanism"] = subject.identity
    return Job(name, "" if subject is None else subject.label, asked, compute, expected, timed)


def conclusions(results: Results, level: str) -> dict[str, Any]:
    """What measurements say, as plain data: the columns and rows of the
    scoreboard, and every claim with its verdict.
    """
    every = sections(results.record)
    columns = [(section, column) for section in every for column in section.columns]
    told = ("name", "title", "help", "low_is_good", "noise", "unit", "thresholds", "why")
    return {
        "columns": [
            {"section": section.name} | {name: getattr(column, name) for name in told}
            for section, column in columns
        ],
        "scoreboard": [
            {"mechanism": subject["label"], "summary": subject["summary"]}
            | {"cells": {column.name: column.cell(results, subject["label"]) for _, column in columns}}
            for subject in results.record["subjects"]
        ],
        "claims": [_judged(claim, section, results, level) for section in every for claim in section.claims],
        "verdicts": VERDICTS,
        "kinds": KINDS,
    }


def _judged(claim: Claim, section: Section, results: Results, level: str) -> dict[str, Any]:
    verdict, found = claim.judge(results)
    told = ("name", "source", "text", "kind", "rule", "refuted", "counts")
    shown = claim.evidence or (section.name if section.figures or section.parts else "")
    command = command_again(claim.name, level) if claim.check is not None else ""
    return {name: getattr(claim, name) for name in told} | {
        "section": shown,
        "verdict": verdict,
        "found": found,
        "command": command,
    }


def command_again(claim: str, level: str) -> str:
    """Measures one claim again, at the level of the run.

    >>> command_again("few-steps", "quick")
    'unsoft compare --claim few-steps --quick --again'
    """
    flag = f" --{level}" if level in ("quick", "full") else ""
    return f"unsoft compare --claim {claim}{flag} --again"


def _with_code(made_by: Callable[..., object], jobs: list[Job]) -> list[Job]:
    """The code of a section that is not part of the package belongs to its questions."""
    code = outside_digest(made_by)
    return [replace(one, question={**one.question, "code": code}) for one in jobs] if code else jobs
