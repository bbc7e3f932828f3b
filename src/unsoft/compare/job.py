"""One measurement: what is asked, and how the answer is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Rows = list[Any]


@dataclass(frozen=True)
class Job:
    """``question`` is everything that the answer depends on; ``expected`` are seconds on an ordinary machine."""

    name: str
    mechanism: str
    """The label of the mechanism, empty if it is about none or about all."""
    question: Mapping[str, Any]
    compute: Callable[[], Rows]
    expected: float
    timed: bool = False
    """Does it measure time? Then all cores are its own; the others are many small steps, which one thread does faster."""
    keep: bool = True
    """May the answer be kept? Not if it depends on something that can change unseen, such as a model on a hub."""
    prepare: Callable[[], object] | None = None
    """Called before anything is measured, if this job must run; an error of it ends the whole run."""

    @property
    def title(self) -> str:
        return f"{self.name}: {self.mechanism}" if self.mechanism else self.name


@dataclass(frozen=True)
class Answer:
    """Rows of a job, or why there are none."""

    name: str
    mechanism: str
    rows: Rows
    seconds: float
    cached: bool = False
    """Was it measured by an earlier run, and kept?"""
    problem: str = ""
    measured: str = ""
    """Date and time (UTC) of the measurement."""
    disturbed: bool = False
    """Did other programs use the machine while time was taken? Such an answer is shown, but not kept."""
