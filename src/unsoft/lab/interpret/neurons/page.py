"""A scan of neurons as one page: planes of all neurons, one neuron in detail, ranked tables, verdicts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from unsoft.lab.interpret.inspection.columns import Column
from unsoft.lab.interpret.neurons.columns import COLUMNS, TITLES
from unsoft.lab.interpret.neurons.result import Scan
from unsoft.lab.interpret.neurons.roles import ROLES, Role
from unsoft.lab.report.page import page, printable

HERE = Path(__file__).parent
MOST_RANKED = 40
_NEURON = Column("neuron", "neuron", "its number in the layer")
_ROLE = Column("role", "", "what it is called by the rules")
_INDUCTION = (
    _NEURON,
    Column("group", "looked at as", "entropy neuron, candidate by its weights, or control"),
    Column("rise", "rise", "of the activation in the second reading, in standard deviations of the first"),
    Column("rise_low", "from", "lower end of the 95 % interval"),
    Column("rise_high", "to", "upper end of the 95 % interval"),
    Column(
        "clipping",
        "Δ H clipped",
        "change of the entropy in the second reading when the rise is clipped, in nats",
    ),
    Column("clipping_low", "from", "lower end of the 95 % interval"),
    Column("clipping_high", "to", "upper end of the 95 % interval"),
    Column("clipping_frozen", "norm frozen", "the same with the scale of the final norm frozen"),
    Column("clipping_loss", "Δ loss", "change of the loss"),
)


def neurons_page(found: Scan) -> str:
    """The text of an HTML file that needs nothing else."""
    called = roles_of(found)
    names = [column.name for column in COLUMNS]
    return page(
        HERE / "page.html",
        title=f"unsoft neurons: {printable(found.model, 120)}",
        styles=[HERE / "page.css"],
        scripts=[HERE / "page.js"],
        data={
            "columns": [asdict(column) for column in COLUMNS],
            "neurons": [
                [record["neuron"], *(_short(record[name]) for name in names)] for record in found.neurons
            ],
            "intervals": {
                record["neuron"]: {
                    name: [_short(record[f"{name}_low"]), _short(record[f"{name}_high"])]
                    for name in names
                    if f"{name}_low" in record
                }
                for record in found.neurons
                if record["neuron"] in found.details
            },
            "sweep": sweeps(found),
            "roles": called,
            "bands": {role.share: band(role, found) for role in ROLES},
            "details": {number: _harmless(detail) for number, detail in found.details.items()},
            "first": _first(found),
        },
        found=found,
        told=found.settings,
        roles=[ranked_table(role, found, called) for role in ROLES],
        verdicts=found.verdicts,
        induction={"columns": _INDUCTION, "rows": found.induction},
    )


def roles_of(found: Scan) -> dict[int, str]:
    """By number what a neuron is called: a role, or "passes" if it passes a test without such weights, or
    "candidate" if it has such weights and passes none."""
    called: dict[int, str] = {}
    for role in ROLES:
        members = {record["neuron"] for record in role.members(found.neurons)}
        named = {record["neuron"] for record in role.candidates(found.neurons)}
        for record in found.neurons:
            number = record["neuron"]
            if number in members:
                called[number] = role.name
            elif role.survives(record):
                called.setdefault(number, "passes")
            elif number in named:
                called.setdefault(number, "candidate")
    return called


def band(role: Role, found: Scan) -> list[float]:
    """Where shares of controls lie: the mean and twice the spread, over all neurons' controls."""
    stem = role.share.removesuffix("_share")
    mean = sum(record[f"{stem}_control"] for record in found.neurons) / len(found.neurons)
    spread = sum(record[f"{stem}_control_spread"] for record in found.neurons) / len(found.neurons)
    return [mean - 2 * spread, mean + 2 * spread]


def sweeps(found: Scan) -> dict[str, Any]:
    """ρ of neurons with details by size of the null space, and the median of the layer."""
    sizes = sorted(
        int(name[4:]) for name in found.neurons[0] if name.startswith("rho_") and name[4:].isdigit()
    )
    middle = [
        sorted(record[f"rho_{size}"] for record in found.neurons)[len(found.neurons) // 2] for size in sizes
    ]
    return {
        "sizes": sizes,
        "median": middle,
        "neurons": {
            record["neuron"]: [_short(record[f"rho_{size}"]) for size in sizes]
            for record in found.neurons
            if record["neuron"] in found.details
        },
    }


def ranked_table(role: Role, found: Scan, called: dict[int, str]) -> dict[str, Any]:
    """The first neurons of a role, for the macro ``table``."""
    rows = [record | {"role": called.get(record["neuron"], "")} for record in role.ranked(found.neurons)]
    return {
        "name": role.name,
        "meaning": role.meaning,
        "members": len(role.members(found.neurons)),
        "passing": sum(role.survives(record) for record in found.neurons),
        "columns": [_NEURON, *(TITLES[name] for name in role.columns), _ROLE],
        "rows": rows[:MOST_RANKED],
        "keys": [record["neuron"] for record in rows[:MOST_RANKED]],
    }


def _first(found: Scan) -> int:
    """The neuron that is shown at first: the best entropy neuron."""
    return int(ROLES[0].ranked(found.neurons)[0]["neuron"])


def _short(value: float) -> float:
    """Four digits are more than a plane can show."""
    return float(f"{value:.4g}")


def _harmless(detail: dict[str, Any]) -> dict[str, Any]:
    tokens = [
        {name: printable(x, 80) if isinstance(x, str) else _short(x) for name, x in token.items()}
        for token in detail["tokens"]
    ]
    curve = [{name: _short(x) for name, x in point.items()} for point in detail["curve"]]
    return {"tokens": tokens, "curve": curve}
