"""The result of an inspection as plain records, the columns of its tables, and the roles of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsoft.checks import one_of
from unsoft.lab.interpret.records import SCHEMA, TableColumn, write_files
from unsoft.notebook import data_frame, html_table

if TYPE_CHECKING:
    from unsoft.lab.interpret.inspection.page import Pattern

SAMPLE = Path(__file__).parent / "sample.txt"
"""A page of text, the default to read."""
COLUMNS = tuple(
    TableColumn(*texts)
    for texts in (
        ("sink_share", "sink share", "share of all attention on the token that receives most"),
        ("sink_mass", "first token", "share of attention on the first token"),
        ("hijack_excess", "hijack excess", "attention on groups of near-duplicate keys, minus their worth"),
        ("hijack_attention", "on crowds", "attention on groups of near-duplicate keys"),
        ("hijack_magnitude", "crowds' worth", "share of these groups in the magnitude of the keys"),
        ("deletion_share", "deletion", "fraction of each source's own direction that the head subtracts"),
        ("deletion_amount", "deleted", "multiples of a source that a row subtracts in total"),
        ("deletion_strength", "per deletion", "mean multiple of a source that one deleting entry subtracts"),
        ("effective_keys", "effective keys", "exp(entropy): number of keys that a row effectively uses"),
        ("participation", "participation", "number of keys with most of the weight"),
        ("entropy", "entropy", "entropy of the absolute weights, in nats"),
        ("sparsity", "flatness S", "mean |a| / root mean square; 1 is uniform"),
        ("top_mass", "top key", "share of the largest weight of a row"),
        ("distance_to_uniform", "to uniform", "share of the mass that must move to make the row uniform"),
        ("negative_share", "negative", "share of the mass with negative sign"),
        ("row_sum", "row sum", "sum of the weights"),
        ("cancellation", "cancelled", "mass lost when positive and negative weights cancel"),
        ("magnitude", "magnitude", "effective number of different keys"),
        ("magnitude_per_key", "magnitude/key", "effective number of different keys, per key"),
        ("groups_per_key", "groups/key", "number of groups of near-duplicate keys, per key"),
        ("pattern_similarity", "twin pattern", "cosine to the most similar head of the layer"),
        ("parameter_similarity", "twin weights", "largest cosine to another head's output projection"),
    )
)
_SINK = TableColumn("sink_token", "sink token", "the token that receives most attention")
TITLES = {column.name: column for column in (*COLUMNS, _SINK)}
"""Columns by name, also that of the token of a sink."""


@dataclass(frozen=True)
class HeadRole:
    """Heads whose ``measure`` is at least ``least``."""

    name: str
    measure: str
    least: float
    meaning: str
    columns: tuple[str, ...]
    """Measures that explain a head in this role; heads are ranked by the first."""

    def heads(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the records of the heads in this role, strongest first."""
        members = [record for record in records if record[self.measure] >= self.least]
        return sorted(members, key=lambda record: -record[self.columns[0]])


ROLES = (
    HeadRole(
        "sink",
        "sink_share",
        0.5,
        "at least half of all its attention goes to one token",
        ("sink_share", "sink_token", "sink_mass", "effective_keys"),
    ),
    HeadRole(
        "hijacked",
        "hijack_excess",
        0.25,
        "groups of near-duplicate keys get at least 25 percentage points more attention than they are worth",
        ("hijack_excess", "hijack_attention", "hijack_magnitude", "magnitude_per_key"),
    ),
    HeadRole(
        "deleting",
        "deletion_share",
        0.5,
        "at least half of what it moves along its sources' own directions is subtracted",
        ("deletion_amount", "deletion_share", "negative_share", "effective_keys"),
    ),
)


@dataclass(frozen=True)
class Inspection:
    """Records of plain numbers and strings, ready for JSON, CSV or a data frame."""

    model: str
    sequences: int
    tokens: int
    heads: list[dict[str, Any]]
    """One record per layer and head, with every measure."""
    depths: list[dict[str, Any]]
    """Measures of collapse of the residual stream before each block, and after the last."""
    layers: list[dict[str, Any]]
    """Name, mechanism, and similarity of attention patterns between heads."""
    skipped: list[str]
    """Attention that was not inspected, with the reason."""
    ablation: dict[str, Any] | None = None
    """Loss without the heads of each role; see
    :func:`unsoft.lab.interpret.inspection.ablation.ablate`."""

    def ranked(self, role: str) -> list[dict[str, Any]]:
        """Return the heads in a role (``sink``, ``hijacked``, ``deleting``), strongest first."""
        roles = {one.name: one for one in ROLES}
        return roles[one_of("ranked", "role", role, roles)].heads(self.heads)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def to_pandas(self) -> Any:
        """Return the heads as a DataFrame, one row per layer and head."""
        return data_frame(self.heads)

    def plot(self, measure: str = "sink_share") -> Any:
        """Return an Altair heat map of one measure over layers and heads."""
        import altair

        one_of("plot", "measure", measure, [name for name in self.heads[0] if name not in ("layer", "head")])
        data = altair.Data(values=self.heads)  # type: ignore[no-untyped-call]
        marks = altair.Chart(data).mark_rect()
        return marks.encode(x="head:O", y="layer:O", color=f"{measure}:Q")

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.model)}: {self.sequences} sequences</p>{html_table(self.heads)}"

    def write(self, folder: Path, patterns: Sequence[Pattern] = ()) -> list[Path]:
        """Write inspection.json, heads.csv, depths.csv, ablation.csv if heads were ablated, and the page
        inspection.html with the attention patterns of some sentences.

        Return the paths.
        """
        from unsoft.lab.interpret.inspection.page import inspection_page

        files = {"inspection.json": self.to_dict(), "heads.csv": self.heads, "depths.csv": self.depths}
        if self.ablation is not None:
            files["ablation.csv"] = self.ablation["removed"]
        return write_files(folder, files | {"inspection.html": inspection_page(self, patterns)})
