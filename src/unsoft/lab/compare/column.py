"""A question of the scoreboard: a number for each mechanism, its interval, and a reading of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unsoft.lab.compare.jobs import Results
from unsoft.lab.evidence import NOT_RUN, Estimate

Answer = Callable[[Results, str], Estimate | float | None]


@dataclass(frozen=True)
class Column:
    """``yes`` and ``partly`` are thresholds of the number; above them is good unless ``low_is_good``.

    ``noise`` is the relative change that repeated runs of the same code show.
    """

    name: str
    title: str
    help: str
    answer: Answer | None
    yes: float = 0.0
    partly: float = 0.0
    low_is_good: bool = False
    noise: float = 1e-6
    unit: str = ""
    why: str = ""
    """The reference points that the thresholds come from."""
    limit: float | None = None
    """The measurement ends here: a value that reaches it is shown as "at least"."""
    note: Callable[[Results, str], str] | None = None
    """What to know of one number, such as the tasks that it is a mean over."""
    badness: Callable[[float], float] | None = None
    """For a number that is best in the middle: how bad it is. Thresholds and order are of this."""

    @property
    def thresholds(self) -> str:
        """In words."""
        up_to = "up to" if self.low_is_good or self.badness else "from"
        unit = self.unit if self.badness is None else "times too many or too few"
        return f"● {up_to} {self.yes:.3g}, ◐ {up_to} {self.partly:.3g} {unit}".rstrip()

    def cell(self, results: Results, label: str) -> dict[str, Any]:
        found = None if self.answer is None else self.answer(results, label)
        if not isinstance(found, Estimate):
            found = None if found is None else Estimate(found)
        value = None if found is None else found.value
        bounds = {} if found is None or found.low is None else {"low": found.low, "high": found.high}
        beyond = value is not None and self.limit is not None and value >= self.limit
        said = "" if self.note is None or value is None else self.note(results, label)
        cell = {"value": value, "reading": self.reading(value), "beyond": beyond} | bounds
        return cell | {"note": said} if said else cell

    def reading(self, value: float | None) -> str:
        """In words: yes, partly, no, or not run."""
        if value is None:
            return NOT_RUN
        sign = -1.0 if self.low_is_good or self.badness else 1.0
        value = value if self.badness is None else self.badness(value)
        if sign * value >= sign * self.yes:
            return "yes"
        return "partly" if sign * value >= sign * self.partly else "no"
