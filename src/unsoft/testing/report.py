"""What the battery found, as a table that can be read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unsoft.testing.measure import Measure


@dataclass(frozen=True)
class Row:
    """One property on one engine."""

    theme: str
    promise: str
    engine: str
    cases: int = 0
    worst: Measure | None = None
    """The measure closest to its tolerance, or furthest beyond it."""
    skipped: str = ""
    """Why the property says nothing here."""
    error: str = ""
    """The exception that stopped it."""

    @property
    def ok(self) -> bool:
        return not self.error and (self.worst is None or self.worst.ok)

    @property
    def finding(self) -> str:
        """The last column of the table: how close to the tolerance, or what is wrong."""
        if self.error:
            return f"FAILED: raised {self.error}"
        if self.worst is None:
            return f"skipped: {self.skipped}"
        if not self.worst.ok:
            return f"FAILED: {self.worst}"
        return f"ok, {self.worst.ratio:.0%} of the tolerance" if self.worst.tolerance else "ok, exact"


@dataclass(frozen=True)
class Report:
    """The rows of a run of :func:`unsoft.testing.check_mechanism`; prints as a table."""

    mechanism: str
    seed: int
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Did every property hold on every engine?"""
        return all(row.ok for row in self.rows)

    @property
    def failures(self) -> list[Row]:
        """The rows that did not."""
        return [row for row in self.rows if not row.ok]

    @property
    def cases(self) -> int:
        """How many comparisons were made."""
        return sum(row.cases for row in self.rows)

    def __str__(self) -> str:
        head = ("property", "engine", "cases", "finding")
        table = [head, *((f"{r.theme}: {r.promise}", r.engine, str(r.cases), r.finding) for r in self.rows)]
        widths = [max(len(line[column]) for line in table) for column in range(3)]
        verdict = "all hold" if self.ok else f"{len(self.failures)} of {len(self.rows)} fail"
        return "\n".join([f"{self.mechanism}: {self.cases} comparisons, {verdict}", *_lines(table, widths)])


def _lines(table: Sequence[tuple[str, ...]], widths: list[int]) -> Iterator[str]:
    for name, engine, cases, finding in table:
        yield f"{name:<{widths[0]}}  {engine:<{widths[1]}}  {cases:>{widths[2]}}  {finding}".rstrip()


def worst_of(measures: list[Measure]) -> Measure | None:
    """The measure with the largest ratio of error to tolerance."""
    return max(measures, key=lambda m: math.inf if not m.ok else m.ratio, default=None)
