"""When is a neuron called an entropy neuron, when a token-frequency neuron?

Rules that were fixed before any number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unsoft.lab.interpret.neurons.statistics import LEVEL

SHARE = 0.1
"""The least share of an effect that must go the way in question, at the lower end of its interval."""
TOP = 0.05
"""The part of the layer's neurons whose weights count as pointing the way in question."""


@dataclass(frozen=True)
class Role:
    """Neurons whose measured effect goes a certain way, more than that of neurons like them.

    Being a candidate by weights (``static``) is asked for too, and never enough.
    """

    name: str
    static: str
    """The figure of the weights that makes candidates; its ``_place`` is 0 for the largest of the layer,
    up to 1."""
    share: str
    """The figure that ranks: the share of the effect that is gone when the way is closed."""
    q: str
    """The corrected probability that controls would have such a share."""
    meaning: str
    columns: tuple[str, ...]

    def survives(self, record: dict[str, Any]) -> bool:
        """Is the share beyond that of controls and worth speaking of, whatever the weights say?"""
        return bool(record[self.q] < LEVEL and record[f"{self.share}_low"] > SHARE)

    def candidates(self, records: list[dict[str, Any]], part: float = TOP) -> list[dict[str, Any]]:
        """The neurons that weights alone would name, strongest first."""
        named = [record for record in records if record[f"{self.static}_place"] < part]
        return sorted(named, key=lambda record: record[f"{self.static}_place"])

    def members(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Neurons in this role, by the share that was measured."""
        found = [record for record in self.candidates(records) if self.survives(record)]
        return sorted(found, key=lambda record: -record[self.share])

    def ranked(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All neurons: first those in the role, then those that survive without being candidates, then the
        others; each by the share that was measured."""
        named = {record["neuron"] for record in self.candidates(records)}

        def place(record: dict[str, Any]) -> tuple[bool, bool, float]:
            survives = self.survives(record)
            return not (survives and record["neuron"] in named), not survives, -record[self.share]

        return sorted(records, key=place)


ENTROPY = Role(
    "entropy",
    "rho",
    "mediated_share",
    "mediated_q",
    "writes where the unembedding hardly looks, and changes the entropy through the final norm's scale",
    ("rho", "mediated_share", "mediated_q", "entropy_total", "entropy_frozen", "entropy_shift", "changed"),
)
FREQUENCY = Role(
    "frequency",
    "frequency_cosine",
    "frequency_share",
    "frequency_q",
    "moves the model's predictions towards or away from the frequencies of words",
    ("frequency_cosine", "frequency_share", "frequency_q", "kl_total", "kl_held", "kl_shift"),
)
ROLES = (ENTROPY, FREQUENCY)
