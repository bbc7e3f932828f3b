"""One claim alone: only the measurements that its check asks for are made, one after the other."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from unsoft.lab.compare.claim import Claim, Finding
from unsoft.lab.compare.jobs import Announce, Answer, Job, Missing, Results, run
from unsoft.lab.compare.section import Request, plan, sections
from unsoft.lab.compare.store import Store


class Chain(NamedTuple):
    """From the sentence of a source to its verdict."""

    claim: Claim
    answers: Sequence[Answer]
    """What the check asked for, in that order."""
    finding: Finding


def claim_named(name: str) -> Claim:
    """The claim of that name; ValueError with all names otherwise.

    >>> claim_named("few-step")
    Traceback (most recent call last):
    ValueError: there is no claim 'few-step'; did you mean 'few-steps'? There are ...
    """
    every = {claim.name: claim for section in sections() for claim in section.claims}
    if name not in every:
        near = difflib.get_close_matches(name, every, 1)
        hint = f"; did you mean {near[0]!r}? There" if near else "; there"
        raise ValueError(f"there is no claim {name!r}{hint} are {', '.join(sorted(every))}")
    return every[name]


def follow(
    claim: Claim, request: Request, store: Store, announce: Announce = lambda *_: None, *, again: bool = False
) -> Chain:
    """The claim is judged; whatever it misses is measured, until it misses nothing."""
    there = {(job.name, job.mechanism): job for job in plan(request)}
    answers: list[Answer] = []
    while True:
        results = Results(_record(request, answers))
        try:
            if claim.check is not None:
                claim.check(results)
        except Missing as missing:
            job = _next(missing, there, answers)
            if job is not None:
                found, finished = run([job], store, announce, again=again)
                if not finished:
                    raise KeyboardInterrupt from None
                answers += found
                continue
        return Chain(claim, answers, claim.judge(results))


def _next(missing: Missing, there: dict[tuple[str, str], Job], answers: Sequence[Answer]) -> Job | None:
    """The job that would help; None if there is none, or it has run and had no answer."""
    asked = {(answer.name, answer.mechanism) for answer in answers}
    return None if missing.wanted is None or missing.wanted in asked else there.get(missing.wanted)


def _record(request: Request, answers: Sequence[Answer]) -> dict[str, Any]:
    subjects = [{"label": one.label, "own": False} for one in request.everyone]
    return {"subjects": subjects, "answers": [asdict(answer) for answer in answers]}
