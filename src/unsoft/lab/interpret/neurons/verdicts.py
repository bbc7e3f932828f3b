"""What a scan says of two published claims; the rules are here, and were here before the numbers.

A verdict is one of those of ``unsoft compare``: "holds", "holds with limits", "does not hold", "not testable
here". Of the neurons that weights alone name, the top 1 % by the figure in question, how many act the way the
claim says, more than controls do? At least half: holds. Some: holds with limits. None: does not hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unsoft.lab.evidence import NOT_TESTABLE, grade
from unsoft.lab.interpret.neurons.roles import ENTROPY, FREQUENCY, Role

if TYPE_CHECKING:
    from unsoft.lab.interpret.neurons.result import Scan

NAMED = 0.01
_LEAST = 200
"""Neurons in a layer below which 1 % of them is no number to judge by."""
CLAIMS = {
    "entropy-neurons": ENTROPY,
    "frequency-neurons": FREQUENCY,
}
"""Names of the claims in ``unsoft compare``, with the role that decides each."""
_WORDS = {
    "entropy-neurons": (
        "of the {named} neurons of layer {layer} with most of their length in the null space,"
        " {survive} change the loss through the norm's scale more than matched controls"
    ),
    "frequency-neurons": (
        "of the {named} neurons of layer {layer} that point most along word frequency, {survive} move"
        " predictions towards or away from it more than matched controls"
    ),
}


def verdicts(found: Scan) -> list[dict[str, Any]]:
    """One for each claim: its name, the verdict, what was found in words, and the numbers it rests on."""
    return [_judge(name, role, found) for name, role in CLAIMS.items()]


def _judge(name: str, role: Role, found: Scan) -> dict[str, Any]:
    told = {"claim": name, "model": found.model, "layer": found.layer, "tokens": found.settings["tokens"]}
    if found.layer != found.layers - 1 or len(found.neurons) < _LEAST:
        why = "the claim is about the last layer" if found.layer != found.layers - 1 else "too few neurons"
        return told | {
            "verdict": NOT_TESTABLE,
            "found": f"{why} ({len(found.neurons)} were looked at)",
        }
    named = role.candidates(found.neurons, NAMED)
    survive = [record for record in named if role.survives(record)]
    elsewhere = [record for record in found.neurons if role.survives(record) and record not in named]
    verdict = grade(2 * len(survive) >= len(named), partly=bool(survive))
    words = _WORDS[name].format(named=len(named), layer=found.layer, survive=len(survive))
    best = max(named, key=lambda record: record[role.share])
    words += (
        f" (largest share {best[role.share]:.2f} [{best[f'{role.share}_low']:.2f},"
        f" {best[f'{role.share}_high']:.2f}], neuron {best['neuron']}); {len(elsewhere)} of the other"
        f" {len(found.neurons) - len(named)} do too"
    )
    return told | {
        "verdict": verdict,
        "found": words,
        "named": [record["neuron"] for record in named],
        "survive": [record["neuron"] for record in survive],
        "elsewhere": [record["neuron"] for record in elsewhere],
    }
