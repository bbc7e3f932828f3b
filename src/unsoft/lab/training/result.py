"""What a run found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """Scores of a finished run, with what they have to be compared with."""

    spec: Mapping[str, Any]
    """The run, with nothing left open."""
    metric: str
    higher_is_better: bool
    score: float
    """On the test of the task's own difficulty."""
    validation: float
    """On other examples, those on which the run was watched; learning rates are chosen by this, unless a
    study names one of ``score_by``."""
    difficulty: str
    """The knob of the task over which ``score_by`` goes; "" if there is none."""
    score_by: list[dict[str, Any]]
    """From easy to hard: the ``value`` of that knob, whether it is ``harder`` than training, the ``score``
    there, that on ``validation`` examples, and those of the ``known`` solution and of the ``shortcut`` on the
    test."""
    chance: float
    known: float
    """The score of the known solution."""
    shortcut: float | None
    """The score of what a mechanism falls back on that lacks what the task asks for."""
    loss: float
    parameters: int
    started: Mapping[str, list[float]]
    """The mechanism's own parameters at first, where they are few: t, beta, gamma, ..."""
    learned: Mapping[str, list[float]]
    """The same in the end."""
    attention: Mapping[str, list[float]]
    """What attention does in the end, for each layer: see :mod:`unsoft.lab.training.attention_figures`."""
    steps: int
    seconds: float
    """Of this session; a run that was resumed took longer."""
    history: list[dict[str, Any]]
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` turns back into an equal result."""
        return asdict(self)

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Result:
        """The inverse of :meth:`to_dict`."""
        return Result(**content)
