"""A claim, and how it is judged."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
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
    again: str = ""
    """Arguments of ``unsoft compare`` that measure what it is judged by."""
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
    command = command_again(claim.again, results.record) if claim.again else ""
    return Judged(claim.name, claim.document, claim.text, claim.section, verdict, found, command)


def command_again(arguments: str, record: Mapping[str, Any]) -> str:
    """Measures the same anew, at the level of the run and beside its folder, so that the page one reads stays.

    >>> command_again("cog --only sign", {"level": {"name": "quick"}, "out": "my report"})
    "unsoft compare cog --only sign --quick --again --out 'my report-again'"
    """
    level = record["level"]["name"]
    flag = f" --{level}" if level in ("quick", "full") else ""
    return f"unsoft compare {arguments}{flag} --again --out {shlex.quote(record['out'] + '-again')}"


def grade(holds: bool, partly: bool = False) -> str:
    """The verdict of a yes or no, with something between.

    >>> grade(True), grade(False, True), grade(False)
    ('holds', 'holds with limits', 'does not hold')
    """
    return HOLDS if holds else LIMITS if partly else DOES_NOT_HOLD
