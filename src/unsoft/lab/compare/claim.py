"""A claim of the literature: what kind it is, the rule that decides it, and its verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unsoft.lab.compare.jobs import Missing, Results
from unsoft.lab.evidence import BY_CONSTRUCTION, HOLDS, NOT_RUN, NOT_TESTABLE

DEFINITION, THEOREM, EXPERIMENT = "definition", "theorem", "experiment"
TRAINED, ELSEWHERE = "trained", "not testable here"
KINDS = {
    DEFINITION: "true by construction: shown, never counted",
    THEOREM: "mathematics, checked to the digits that its rule names",
    EXPERIMENT: "a measurement that could have come out otherwise",
    TRAINED: "decided by trained models, from the records of a study",
    ELSEWHERE: "this page cannot decide it, for the reason given",
}
COUNTED = (THEOREM, EXPERIMENT, TRAINED)
"""Kinds that could have failed."""
SURVEY, SU, ROSIC = "survey of negative attention 2025", "Su 2023", "Rosić 2026"
"""Where claims come from."""
Finding = tuple[str, str]
"""The verdict and what was measured, in words with numbers."""


@dataclass(frozen=True)
class Claim:
    """``check`` finds a verdict from measurements; what it needs is what it reads.

    ``rule`` says how, ``refuted`` which outcome would be against the claim: both are written before the
    number is known. A claim of the kind "not testable here" has the reason in ``needs`` instead of a check.
    """

    name: str
    source: str
    text: str
    kind: str
    rule: str = ""
    refuted: str = ""
    check: Callable[[Results], Finding] | None = None
    needs: str = ""
    evidence: str = ""
    """The section that shows it, if that is another one."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"claim {self.name}: there is no kind {self.kind!r}")
        if self.kind == ELSEWHERE:
            if not self.needs or self.check is not None:
                raise ValueError(f"claim {self.name}: what cannot be tested has a reason and no check")
        elif self.check is None or not self.rule:
            raise ValueError(f"claim {self.name}: it needs a check and its rule in words")
        if self.kind in (EXPERIMENT, TRAINED) and not self.refuted:
            raise ValueError(f"claim {self.name}: it must say which outcome would refute it")

    @property
    def counts(self) -> bool:
        """Could it have failed?"""
        return self.kind in COUNTED

    def judge(self, results: Results) -> Finding:
        """A verdict is only ever computed from what was measured; without that it is "not run", and why."""
        if self.check is None:
            return NOT_TESTABLE, self.needs
        try:
            verdict, found = self.check(results)
        except Missing as why:
            return NOT_RUN, str(why)
        return (BY_CONSTRUCTION if self.kind == DEFINITION and verdict == HOLDS else verdict), found
