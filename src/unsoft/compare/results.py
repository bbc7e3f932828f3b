"""The record of a comparison, asked for rows by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unsoft.report.figure import in_order


class Missing(LookupError):
    """A measurement that did not run, or had no answer; the message says why."""


class Results:
    """What was measured. ``rows("focus", "cog")`` are plain dictionaries; absent ones raise :class:`Missing`."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = record
        subjects = record["subjects"]
        self.labels = in_order([s["label"] for s in subjects], [s["label"] for s in subjects if s["own"]])
        self._answers = {(a["name"], a["mechanism"]): a for a in record["answers"]}

    def rows(self, name: str, mechanism: str = "") -> list[Any]:
        found = self._answers.get((name, mechanism))
        of = f" of {mechanism}" if mechanism else ""
        if found is None:
            raise Missing(f"the measurement '{name}'{of} did not run")
        if not found["rows"]:
            raise Missing(
                f"the measurement '{name}'{of} has no answer: {found['problem'] or 'nothing to measure'}"
            )
        return found["rows"]

    def get(self, name: str, mechanism: str = "") -> list[Any]:
        """The rows, or none."""
        try:
            return self.rows(name, mechanism)
        except Missing:
            return []

    def problem(self, name: str, mechanism: str = "") -> str:
        """Why a measurement has no rows; empty if it has some, or did not run."""
        found = self._answers.get((name, mechanism))
        return "" if found is None else str(found["problem"])

    def each(self, name: str) -> list[dict[str, Any]]:
        """The rows of all mechanisms that take part, with the mechanism's label in each."""
        return [{"mechanism": label, **row} for label in self.labels for row in self.get(name, label)]

    def matching(self, start: str) -> list[dict[str, Any]]:
        """The rows of all measurements about no single mechanism whose name begins so."""
        return [
            row
            for (name, of), a in self._answers.items()
            if not of and name.startswith(start)
            for row in a["rows"]
        ]
