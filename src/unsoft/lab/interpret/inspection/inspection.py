"""What an inspection found, as plain records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unsoft.files import write_csv, write_json
from unsoft.lab.interpret.inspection.roles import ROLES, Role

SCHEMA = 1


@dataclass(frozen=True)
class Inspection:
    """Records are dicts of plain numbers and words, ready for JSON, CSV or a data frame."""

    model: str
    sequences: int
    tokens: int
    heads: list[dict[str, Any]]
    """One for each layer and head, with every measure."""
    depths: list[dict[str, Any]]
    """The residual stream before each block, and after the last: measures of collapse."""
    layers: list[dict[str, Any]]
    """Name, mechanism and the similarity of patterns between heads."""
    mechanisms: dict[str, dict[str, Any]]
    """Measures of the mechanisms themselves, for those that are a formula."""
    skipped: list[str]
    """Attention that was not looked at, with the reason."""
    ablation: dict[str, Any] | None = None
    """What the model loses without heads of each role; see
    :func:`unsoft.lab.interpret.inspection.ablation.ablate`."""

    def ranked(self, role: Role | str) -> list[dict[str, Any]]:
        """The heads in a role (``sink``, ``hijacked``, ``deleting``), strongest first."""
        if isinstance(role, str):
            known = {known.name: known for known in ROLES}
            if role not in known:
                raise ValueError(f"ranked: argument 'role' must be one of {', '.join(known)}, not {role!r}")
            role = known[role]
        return role.heads(self.heads)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def write(self, folder: Path) -> list[Path]:
        """inspection.json, heads.csv, depths.csv, and ablation.csv if heads were removed; returns what was
        written."""
        write_json(folder / "inspection.json", self.to_dict())
        write_csv(folder / "heads.csv", self.heads)
        write_csv(folder / "depths.csv", self.depths)
        names = ["inspection.json", "heads.csv", "depths.csv"]
        if self.ablation is not None:
            write_csv(folder / "ablation.csv", self.ablation["removed"])
            names.append("ablation.csv")
        return [folder / name for name in names]
