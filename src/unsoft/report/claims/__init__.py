"""Every checkable claim of the three documents, with a verdict that is computed from a measurement and from nothing else."""

from unsoft.report.claims import clones, linear, magnitude, open_questions, signs, sparsity
from unsoft.report.claims.claim import (
    DOES_NOT_HOLD,
    HOLDS,
    LIMITS,
    NOT_RUN,
    NOT_TESTABLE,
    Claim,
    Judged,
    judge,
)
from unsoft.report.results import Results

GROUPS = (signs, sparsity, linear, clones, magnitude, open_questions)
VERDICTS = (HOLDS, LIMITS, DOES_NOT_HOLD, NOT_TESTABLE, NOT_RUN)


def claims() -> list[Claim]:
    """All claims, in the order of the documents."""
    return [claim for group in GROUPS for claim in group.CLAIMS]


def judged(results: Results) -> list[Judged]:
    """Every claim with its verdict."""
    return [judge(claim, results) for claim in claims()]
