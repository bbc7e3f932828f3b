"""The sections, imported only when they are requested, and the measurements that a request needs."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from unsoft.checks import did_you_mean
from unsoft.lab.compare import sections as folder
from unsoft.lab.compare.jobs import Announce, Answer, Job, Missing, Results, run
from unsoft.lab.compare.section import Claim, Finding, Request, Section
from unsoft.lab.compare.store import AnswerStore, outside_digest

CLAIMS = "claims"
"""Accepted as the name of a section: the facts of all sections."""


def section_names() -> list[str]:
    """Return the names of all sections, which are those of their files, without importing any."""
    return sorted(module.name for module in pkgutil.iter_modules(folder.__path__))


def sections(only: Sequence[str] = (), source: Mapping[str, Any] | None = None) -> list[Section]:
    """Import and return sections in the order of the page.

    ``only`` are names; without any, or with "claims", all sections. ``source`` is a request or a record:
    sections that need a field which it lacks are left out.
    """
    every: list[Section] = []
    for name in dict.fromkeys(only if only and CLAIMS not in only else section_names()):
        section: Section = importlib.import_module(f"{folder.__name__}.{name}").SECTION
        section.name, section.title = name, section.title or name.capitalize()
        every.append(section)
    usable = [one for one in every if source is None or not one.needs or source.get(one.needs)]
    return sorted(usable, key=lambda section: (section.order, section.name))


def plan(request: Request, only: Sequence[str] = ()) -> list[Job]:
    """Return the jobs of the requested sections: first those that must prepare something, facts last."""
    jobs: list[Job] = []
    facts: list[Job] = []
    for section in sections(only, vars(request)):
        for make in section.measured if not only or section.name in only else ():
            jobs += _with_code(make, request)
        for make in section.stated:
            facts += _with_code(make, request)
    unique = {(job.name, job.mechanism): job for job in jobs}  # two sections read the records of studies
    return sorted(unique.values(), key=lambda job: job.prepare is None) + facts


def _with_code(make: Callable[[Request], list[Job]], request: Request) -> list[Job]:
    """Return jobs whose questions include the code of a section outside the package."""
    code, jobs = outside_digest(make), make(request)
    return [replace(one, question={**one.question, "code": code}) for one in jobs] if code else jobs


def claim_named(name: str) -> Claim:
    """Return the claim of that name.

    >>> claim_named("few-step")
    Traceback (most recent call last):
    ValueError: there is no claim 'few-step'; did you mean 'few-steps'?
    """
    claims = {claim.name: claim for section in sections() for claim in section.claims}
    if name not in claims:
        hint = did_you_mean(name, claims) or f"; there are {', '.join(sorted(claims))}"
        raise ValueError(f"there is no claim {name!r}{hint}")
    return claims[name]


def follow(
    claim: Claim,
    request: Request,
    store: AnswerStore,
    announce: Announce = lambda *_: None,
    *,
    again: bool = False,
) -> tuple[list[Answer], Finding]:
    """Judge one claim, measuring only what its check asks for, one after the other.

    Return the measurements in the order in which they were asked for, and the verdict.
    """
    jobs = {(job.name, job.mechanism): job for job in plan(request)}
    labels = [{"label": one.label, "own": False} for one in request.candidates]
    answers: list[Answer] = []
    while True:
        results = Results({"subjects": labels, "answers": [asdict(answer) for answer in answers]})
        try:
            claim.check(results)
        except Missing as missing:
            # A job that has run without an answer is not asked again.
            measured = {(answer.name, answer.mechanism) for answer in answers}
            wanted = missing.wanted
            if wanted is not None and wanted in jobs and wanted not in measured:
                answer, finished = run([jobs[wanted]], store, announce, again=again)
                if not finished:
                    raise KeyboardInterrupt from None
                answers += answer
                continue
        return answers, claim.judge(results)
