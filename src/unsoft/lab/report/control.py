"""A choice above charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Control:
    """``options`` are pairs of a value and its words; the charts know it as ``name``."""

    name: str
    label: str
    options: Sequence[tuple[float, str]]
    first: float = 0.0
