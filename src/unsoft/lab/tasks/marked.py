"""Random tokens and a mark after them: what copying and compressing have in common."""

from __future__ import annotations

from dataclasses import dataclass

from unsoft.lab.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Marked(Task):
    """The base of tasks about ``length`` random tokens; the mark is the last of all tokens."""

    length: int = 16
    vocabulary: int = 16

    def __post_init__(self) -> None:
        self.at_least(1, "length")
        self.at_least(2, "vocabulary")

    @property
    def size(self) -> int:
        return self.vocabulary + 1
