"""A scan of neurons as one HTML page: planes of all neurons, details of one, ranked tables, verdicts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from unsoft.lab.interpret.neurons.result import COLUMNS, ROLES, TITLES, NeuronRole, Scan
from unsoft.lab.interpret.records import TableColumn
from unsoft.lab.report.page import page, printable

HERE = Path(__file__).parent
MOST_RANKED = 40
_NEURON = TableColumn("neuron", "neuron", "its number in the layer")
_ROLE = TableColumn("role", "", "its role by the rules")


def neurons_page(scan: Scan) -> str:
    """Return the text of a self-contained HTML file."""
    labels = role_labels(scan)
    names = [column.name for column in COLUMNS]
    detailed = [record for record in scan.neurons if record["neuron"] in scan.details]
    return page(
        HERE / "page.html",
        title=f"unsoft neurons: {printable(scan.model, 120)}",
        styles=[HERE / "page.css"],
        scripts=[HERE / "page.js"],
        data={
            "columns": [asdict(column) for column in COLUMNS],
            "neurons": [
                [record["neuron"], *(_short(record[name]) for name in names)] for record in scan.neurons
            ],
            "intervals": {
                record["neuron"]: {
                    name: [_short(record[f"{name}_low"]), _short(record[f"{name}_high"])]
                    for name in names
                    if f"{name}_low" in record
                }
                for record in detailed
            },
            "roles": labels,
            "bands": {role.share: band(role, scan) for role in ROLES},
            "details": {number: _for_page(detail) for number, detail in scan.details.items()},
            "first": int(ROLES[0].ranked(scan.neurons)[0]["neuron"]),  # the best entropy neuron
        },
        scan=scan,
        settings=scan.settings,
        roles=[ranked_table(role, scan, labels) for role in ROLES],
        verdicts=scan.verdicts,
    )


def role_labels(scan: Scan) -> dict[int, str]:
    """Return the label of each neuron that has one: a role, "passes" for passing a test without candidate
    weights, or "candidate" for candidate weights without passing."""
    labels: dict[int, str] = {}
    for role in ROLES:
        members = {record["neuron"] for record in role.members(scan.neurons)}
        named = {record["neuron"] for record in role.candidates(scan.neurons)}
        for record in scan.neurons:
            number = record["neuron"]
            if number in members:
                labels[number] = role.name
            elif role.survives(record):
                labels.setdefault(number, "passes")
            elif number in named:
                labels.setdefault(number, "candidate")
    return labels


def band(role: NeuronRole, scan: Scan) -> list[float]:
    """Return the range of the controls' shares: mean ± two standard deviations, averaged over neurons."""
    stem = role.share.removesuffix("_share")
    mean = sum(record[f"{stem}_control"] for record in scan.neurons) / len(scan.neurons)
    spread = sum(record[f"{stem}_control_spread"] for record in scan.neurons) / len(scan.neurons)
    return [mean - 2 * spread, mean + 2 * spread]


def ranked_table(role: NeuronRole, scan: Scan, labels: dict[int, str]) -> dict[str, Any]:
    """Return the first neurons of a role, for the macro ``table``."""
    ranked = role.ranked(scan.neurons)[:MOST_RANKED]
    return {
        "name": role.name,
        "meaning": role.meaning,
        "members": len(role.members(scan.neurons)),
        "passing": sum(role.survives(record) for record in scan.neurons),
        "columns": [_NEURON, *(TITLES[name] for name in role.columns), _ROLE],
        "rows": [record | {"role": labels.get(record["neuron"], "")} for record in ranked],
        "keys": [record["neuron"] for record in ranked],
    }


def _short(value: float) -> float:
    """Round to four digits, more than a plane can show."""
    return float(f"{value:.4g}")


def _for_page(detail: dict[str, Any]) -> dict[str, Any]:
    """Return the details with printable tokens and short numbers."""
    tokens = [
        {name: printable(x, 80) if isinstance(x, str) else _short(x) for name, x in token.items()}
        for token in detail["tokens"]
    ]
    curve = [{name: _short(x) for name, x in point.items()} for point in detail["curve"]]
    return {"tokens": tokens, "curve": curve}
