"""The result of a scan as plain records: columns of its tables, roles of neurons, verdicts on two claims.

Rules were fixed before any measurement. A verdict is one of those of ``unsoft compare``. Among the neurons
that weights alone would name, the top 1 % by the figure in question, count those that act the way the claim
says, more than controls do. At least half: supported. Some: partly supported. None: not supported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unsoft.checks import one_of
from unsoft.lab.bench.machine import package_versions
from unsoft.lab.evidence import NOT_TESTABLE, grade
from unsoft.lab.interpret.records import SCHEMA, TableColumn, write_files

LEVEL = 0.05
"""Largest corrected probability q that counts as significant."""
SHARE = 0.1
"""Smallest share of an effect that must go the way in question, at the lower end of its interval."""
TOP = 0.05
"""Fraction of the layer's neurons whose weights count as pointing the way in question."""
NAMED = 0.01
"""Fraction of the layer's neurons that a verdict is about."""
_LEAST = 200
"""With fewer neurons in a layer, 1 % of them is too few for a verdict."""

COLUMNS = tuple(
    TableColumn(*texts)
    for texts in (
        ("rho", "ρ", "share of its length in the null space, the directions that the unembedding sees least"),
        ("norm", "norm", "length of its output weights"),
        ("logit_variance", "LogitVar", "variance over words of the cosine between the neuron and the word"),
        ("mean_activation", "mean", "mean activation"),
        ("spread", "spread", "standard deviation of the activation"),
        ("total", "|Δ loss|", "mean change of the loss at a token when the neuron is set to its mean"),
        ("direct", "frozen", "the same with the scale of the final norm frozen"),
        ("mediated_share", "via norm", "share of the loss change that disappears with the scale frozen"),
        ("mediated_q", "q", "probability of such a share among matched controls, corrected for all neurons"),
        ("mediated_control", "controls", "mean share of the matched controls"),
        ("entropy_total", "|Δ H|", "mean change of the entropy at a token, in nats"),
        ("entropy_frozen", "|Δ H| frozen", "the same with the scale of the final norm frozen"),
        ("entropy_mediated_share", "H via norm", "share of the entropy change that disappears, scale frozen"),
        ("entropy_shift", "Δ H", "mean signed change of the entropy; negative: the neuron raises entropy"),
        ("loss_shift", "Δ loss", "mean signed change of the loss"),
        ("changed", "other word", "share of tokens where another word becomes the most likely"),
        ("frequency_cosine", "cos freq", "cosine between its effect on logits and log word frequency"),
        ("frequency_share", "via frequency", "share of the change that disappears with frequency held"),
        ("frequency_q", "q freq", "probability of such a share among matched controls, corrected likewise"),
        ("kl_total", "|Δ KL|", "mean change of the divergence from word frequencies"),
        ("kl_held", "|Δ KL| held", "the same with the component along word frequency held"),
        ("kl_shift", "Δ KL", "mean signed change; negative: the neuron moves the model off word frequencies"),
    )
)
TITLES = {column.name: column for column in COLUMNS}


@dataclass(frozen=True)
class NeuronRole:
    """Neurons whose measured effect goes a certain way, more than that of similar neurons.

    A member must also be a candidate by its weights (``static``), which alone is never enough.
    """

    name: str
    static: str
    """Figure of the weights that defines candidates; its ``_place`` is 0 for the largest of the layer, up to
    1."""
    share: str
    """Figure that ranks: the share of the effect that disappears when the way is closed."""
    q: str
    """Corrected probability that controls have such a share."""
    meaning: str
    columns: tuple[str, ...]

    def survives(self, record: dict[str, Any]) -> bool:
        """Return True if the share exceeds that of controls and is large enough, whatever the weights."""
        return bool(record[self.q] < LEVEL and record[f"{self.share}_low"] > SHARE)

    def candidates(self, records: list[dict[str, Any]], part: float = TOP) -> list[dict[str, Any]]:
        """Return the neurons that weights alone would name, strongest first."""
        named = [record for record in records if record[f"{self.static}_place"] < part]
        return sorted(named, key=lambda record: record[f"{self.static}_place"])

    def members(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the neurons in this role, by the measured share."""
        members = [record for record in self.candidates(records) if self.survives(record)]
        return sorted(members, key=lambda record: -record[self.share])

    def ranked(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return all neurons: members, then those that survive without being candidates, then the others;
        each group by the measured share."""
        named = {record["neuron"] for record in self.candidates(records)}

        def order(record: dict[str, Any]) -> tuple[bool, bool, float]:
            survives = self.survives(record)
            return not (survives and record["neuron"] in named), not survives, -record[self.share]

        return sorted(records, key=order)


ENTROPY = NeuronRole(
    "entropy",
    "rho",
    "mediated_share",
    "mediated_q",
    "writes where the unembedding hardly looks, and changes the entropy through the final norm's scale",
    ("rho", "mediated_share", "mediated_q", "entropy_total", "entropy_frozen", "entropy_shift", "changed"),
)
FREQUENCY = NeuronRole(
    "frequency",
    "frequency_cosine",
    "frequency_share",
    "frequency_q",
    "moves the model's predictions towards or away from the frequencies of words",
    ("frequency_cosine", "frequency_share", "frequency_q", "kl_total", "kl_held", "kl_shift"),
)
ROLES = (ENTROPY, FREQUENCY)
CLAIMS = {
    "entropy-neurons": (
        ENTROPY,
        "of the {named} neurons of layer {layer} with most of their length in the null space,"
        " {survive} change the loss through the norm's scale more than matched controls",
    ),
    "frequency-neurons": (
        FREQUENCY,
        "of the {named} neurons of layer {layer} that point most along word frequency, {survive} move"
        " predictions towards or away from it more than matched controls",
    ),
}
"""Names of the claims in ``unsoft compare``, with the role that decides each and the sentence about it."""


@dataclass(frozen=True)
class Scan:
    """Records of plain numbers and strings, ready for JSON, CSV or a data frame; see docs/neurons.md."""

    model: str
    layer: int
    layers: int
    settings: dict[str, Any]
    """Number of tokens, null directions and controls, seed, and so on."""
    neurons: list[dict[str, Any]]
    """One record per ablated neuron, with every figure."""
    spectrum: list[float]
    """Singular values of the unembedding, largest first."""
    induction: list[dict[str, Any]]
    """Neurons on repeated texts; empty if sequences are too short."""
    details: dict[int, dict[str, Any]]
    """For some neurons, shown on the page: the ablation curve and the tokens that activate them most."""

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """One verdict per claim, with a sentence and the numbers behind it, for ``unsoft compare``."""
        return [self._verdict(*claim) for claim in CLAIMS.items()]

    def _verdict(self, claim: str, decided_by: tuple[NeuronRole, str]) -> dict[str, Any]:
        role, sentence = decided_by
        tokens = self.settings["tokens"]
        record = {"claim": claim, "model": self.model, "layer": self.layer, "tokens": tokens}
        if len(self.neurons) < _LEAST:
            problem = f"{len(self.neurons)} neurons are too few; at least {_LEAST} are needed"
            return record | {"verdict": NOT_TESTABLE, "found": problem}
        named = role.candidates(self.neurons, NAMED)
        survive = [one for one in named if role.survives(one)]
        elsewhere = [one for one in self.neurons if role.survives(one) and one not in named]
        best = max(named, key=lambda one: one[role.share])
        low, high = best[f"{role.share}_low"], best[f"{role.share}_high"]
        return record | {
            "verdict": grade(2 * len(survive) >= len(named), partly=bool(survive)),
            "found": sentence.format(named=len(named), layer=self.layer, survive=len(survive))
            + f" (largest share {best[role.share]:.2f} [{low:.2f}, {high:.2f}], neuron {best['neuron']});"
            f" {len(elsewhere)} of the other {len(self.neurons) - len(named)} do too",
            "named": [one["neuron"] for one in named],
            "survive": [one["neuron"] for one in survive],
            "elsewhere": [one["neuron"] for one in elsewhere],
        }

    def ranked(self, role: str) -> list[dict[str, Any]]:
        """Return the neurons in a role (``entropy``, ``frequency``), strongest measured share first."""
        roles = {one.name: one for one in ROLES}
        return roles[one_of("ranked", "role", role, roles)].members(self.neurons)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def write(self, folder: Path, command: str = "") -> list[Path]:
        """Write neurons.json, neurons.csv, verdicts.json, the page neurons.html and, if not empty,
        induction.csv.

        Return the paths. ``command`` reproduces the measurement, for readers of the verdicts.
        """
        from unsoft.lab.interpret.neurons.page import neurons_page

        files = {"neurons.json": self.to_dict(), "neurons.csv": self.neurons}
        files |= {"induction.csv": self.induction} if self.induction else {}
        files |= {"verdicts.json": self.verdict_record(command)}
        return write_files(folder, files | {"neurons.html": neurons_page(self)})

    def verdict_record(self, command: str = "") -> dict[str, Any]:
        """Return what ``unsoft compare`` shows about the claims."""
        return {
            "schema": SCHEMA,
            "kind": "neurons",
            "model": self.model,
            "command": command,
            "verdicts": self.verdicts,
            "settings": self.settings,
            "versions": package_versions("transformers"),
        }
