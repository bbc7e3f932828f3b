"""What a scan of neurons found, as plain records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import unsoft
from unsoft.files import write_csv, write_json
from unsoft.lab.interpret.neurons.roles import ROLES, Role
from unsoft.lab.interpret.neurons.verdicts import verdicts

SCHEMA = 1


@dataclass(frozen=True)
class Scan:
    """Records are dicts of plain numbers and words, ready for JSON, CSV or a data frame.
    docs/neurons.md lists them."""

    model: str
    layer: int
    layers: int
    settings: dict[str, Any]
    """What was looked at and how: tokens, null directions, controls, seed."""
    neurons: list[dict[str, Any]]
    """One for each neuron that was ablated, with every figure."""
    spectrum: list[float]
    """Singular values of the unembedding, largest first."""
    induction: list[dict[str, Any]]
    """Neurons on texts that repeat themselves; empty in other layers than the last."""
    details: dict[int, dict[str, Any]]
    """For the page, of some neurons: the curve of ablation and the tokens that activate them most."""

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """What this says of published claims, for ``unsoft compare``."""
        return verdicts(self)

    def ranked(self, role: Role | str) -> list[dict[str, Any]]:
        """The neurons in a role (``entropy``, ``frequency``), by what was measured, strongest first."""
        known = {one.name: one for one in ROLES}
        if isinstance(role, str):
            if role not in known:
                raise ValueError(f"ranked: argument 'role' must be one of {', '.join(known)}, not {role!r}")
            role = known[role]
        return role.members(self.neurons)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def write(self, folder: Path, command: str = "") -> list[Path]:
        """neurons.json, neurons.csv, verdicts.json and, if there is any, induction.csv;
        returns what was written.

        ``command`` is what measures the same again, for those who read the verdicts.
        """
        write_json(folder / "neurons.json", self.to_dict())
        write_csv(folder / "neurons.csv", self.neurons)
        write_json(folder / "verdicts.json", self.verdict_record(command))
        names = ["neurons.json", "neurons.csv", "verdicts.json"]
        if self.induction:
            write_csv(folder / "induction.csv", self.induction)
            names.append("induction.csv")
        return [folder / name for name in names]

    def verdict_record(self, command: str = "") -> dict[str, Any]:
        """What ``unsoft compare`` shows of the claims, with what it rests on."""
        return {
            "schema": SCHEMA,
            "kind": "neurons",
            "model": self.model,
            "command": command,
            "verdicts": self.verdicts,
            "settings": self.settings,
            "versions": {
                "unsoft": unsoft.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
