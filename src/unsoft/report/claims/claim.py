"""A claim, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from unsoft.report.results import Missing, Results

HOLDS, LIMITS, DOES_NOT_HOLD = "holds", "holds with limits", "does not hold"
NOT_TESTABLE, NOT_RUN = "not testable here", "not run"
Finding = tuple[str, str]
"""The verdict and what was measured, in words with numbers."""


@dataclass(frozen=True)
class Claim:
    """``check`` finds a verdict from measurements; without it the claim is not run, for the reason ``needs``."""

    name: str
    document: str
    text: str
    section: str
    command: str = ""
    check: Callable[[Results], Finding] | None = None
    needs: str = ""


@dataclass(frozen=True)
class Judged:
    """A claim as pages and files show it."""

    name: str
    document: str
    text: str
    section: str
    verdict: str
    found: str
    command: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(claim: Claim, results: Results) -> Judged:
    """A verdict is only ever computed from what was measured; without that it is "not run", and why."""
    if claim.check is None:
        verdict, found = NOT_RUN, claim.needs
    else:
        try:
            verdict, found = claim.check(results)
        except Missing as why:
            verdict, found = NOT_RUN, str(why)
    return Judged(claim.name, claim.document, claim.text, claim.section, verdict, found, claim.command)


def grade(holds: bool, partly: bool = False) -> str:
    """The verdict of a yes or no, with something between.

    >>> grade(True), grade(False, True), grade(False)
    ('holds', 'holds with limits', 'does not hold')
    """
    return HOLDS if holds else LIMITS if partly else DOES_NOT_HOLD
