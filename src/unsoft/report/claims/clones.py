"""Document 002: hijacking by clones, and what a gate does about it."""

from __future__ import annotations

from unsoft.report.claims.claim import Claim, Finding, grade
from unsoft.report.results import Results

_DOCUMENT = "002"
_HIJACK = "softmax magnitude --only hijack"
_FACTS = "--only claims"


def example(results: Results) -> Finding:
    share = results.rows("example")[0]["share"]
    return grade(abs(share - 20 / 70) < 1e-6), f"measured {share:.4f} and {1 - share:.4f}"


def hijacked(results: Results) -> Finding:
    rows = {
        row["clones"]: row["share"] for row in results.rows("hijack", "softmax") if row["kind"] == "measured"
    }
    return grade(rows[1] > 0.9 and rows[1000] < 0.05), (
        f"a key 20 times as relevant keeps {rows[1]:.3f} against 1 clone, {rows[50]:.3f} against 50, {rows[1000]:.3f} against 1000"
    )


def gate(results: Results) -> Finding:
    softmax, gated = (
        {row["clones"]: row["share"] for row in results.rows("hijack", name) if row["kind"] == "measured"}
        for name in ("softmax", "magnitude")
    )
    stops = gated[1000] > 0.5 * gated[1]
    return grade(stops, gated[50] > 1.1 * softmax[50]), (
        f"against 50 clones {gated[50]:.3f} instead of {softmax[50]:.3f}, against 1000 {gated[1000]:.3f} instead of {softmax[1000]:.3f}: "
        "at its start the sigmoid only delays the hijack, since it tends to a constant"
    )


def one_unit(results: Results) -> Finding:
    rows = results.rows("units")
    weight = next(row["units"] for row in rows if row["gate"] == "weight")
    sigmoid = next(row["units"] for row in rows if row["gate"] == "sigmoid")
    sharp = rows[-1]
    return grade(abs(sigmoid - 1) < 0.1, abs(weight - 1) < 0.01), (
        f"50 clones count as {weight:.2f} if the gate passes the weight itself, as {sigmoid:.1f} through sigmoid(μ), as {sharp['units']:.2f} "
        f"through sigmoid({sharp['slope']:g}μ {sharp['offset']:+g})"
    )


CLAIMS = (
    Claim("example", _DOCUMENT, "Relevance 20 against 50 keys of relevance 1 leaves 0.286 and 0.714.", "hijack", _FACTS, example),
    Claim("hijacking", _DOCUMENT, "Under softmax many mediocre copies drown one relevant key.", "hijack", _HIJACK, hijacked),
    Claim("gate", _DOCUMENT, "The magnitude gate keeps clones from taking over.", "hijack", _HIJACK, gate),
    Claim("one-unit", _DOCUMENT, "A gated cluster of clones counts as one unit of information.", "hijack", _FACTS, one_unit),
)  # fmt: skip
