"""What is a head good for, or bad at? Three roles, each a threshold on a measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Role:
    """Heads whose ``measure`` is at least ``least``."""

    name: str
    measure: str
    least: float
    meaning: str
    columns: tuple[str, ...]
    """Measures that explain a head in this role; by the first of them heads are ranked."""

    def heads(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Records of the heads in this role, strongest first."""
        found = [record for record in records if record[self.measure] >= self.least]
        return sorted(found, key=lambda record: -record[self.columns[0]])


ROLES = (
    Role(
        "sink",
        "sink_share",
        0.5,
        "at least half of all its attention goes to one token",
        ("sink_share", "sink_token", "sink_mass", "effective_keys"),
    ),
    Role(
        "hijacked",
        "hijack_excess",
        0.25,
        "crowds of look-alike keys get 25 points more of its attention than they are worth",
        ("hijack_excess", "hijack_attention", "hijack_magnitude", "magnitude_per_key"),
    ),
    Role(
        "deleting",
        "deletion_share",
        0.5,
        "of what it moves along its sources' own directions, at least half is removed",
        ("deletion_amount", "deletion_share", "negative_share", "effective_keys"),
    ),
)
