"""Document 001: linear attention, its norms, its rank, its dimensions, and decay."""

from __future__ import annotations

from collections.abc import Callable

from unsoft.report.claims.claim import Claim, Finding, grade
from unsoft.report.results import Results

_DOCUMENT = "001"
_COMMAND = "--only claims"


def _closed_form(kind: str) -> Callable[[Results], Finding]:
    def check(results: Results) -> Finding:
        rows = [row for row in results.rows("features") if row["kind"] == kind]
        error = max(abs(row["measured"] - row["theory"]) for row in rows)
        return grade(
            error < 2e-3
        ), f"largest distance over {len(rows)} widths and 200,000 keys each: {error:.1g}"

    return check


def decay(results: Results) -> Finding:
    rows = results.rows("decay")
    error = max(abs(row["measured"] - row["theory"]) for row in rows)
    fast = [row["measured"] for row in rows if row["decay"] < 0.95]
    return grade(error < 1e-6 and fast[-1] < fast[0] / 3), (
        f"largest distance {error:.1g}; with decay 0.9 S goes from {fast[0]:.3f} to {fast[-1]:.3f} as rows get longer"
    )


def norms(results: Results) -> Finding:
    rows = results.rows("norm ratios")
    largest = max(row["largest"] for row in rows)
    last = rows[-1]
    return grade(all(abs(row["largest"] - row["sqrt"]) < 0.1 * row["sqrt"] for row in rows)), (
        f"the largest found is {largest:.4f} in every dimension up to {last['width']}, where √d = {last['sqrt']:.0f}; "
        "it lies between 1/√d and 1"
    )


def rank(results: Results) -> Finding:
    rows = results.rows("causal ranks")
    causal = [row for row in rows if row["causal"]]
    full = [row["mechanism"] for row in causal if row["rank"] == row["length"]]
    lost = [f"{row['mechanism']} {row['rank']}" for row in causal if row["rank"] < row["length"]]
    low = max(row["rank"] for row in rows if not row["causal"])
    why = "relu puts zeros on the diagonal, and a tiny diagonal entry is no rank in double precision"
    return grade(not lost, bool(full)), (
        f"of {causal[0]['length']}: full for {', '.join(full) or 'none'}; {', '.join(lost) or 'none'} lost some ({why}); "
        f"without the mask at most {low}"
        if lost
        else f"full, {causal[0]['length']}, for {', '.join(full)}; without the mask at most {low}"
    )


def dimensions(results: Results) -> Finding:
    rows = results.rows("dimensions")
    verdicts, parts = [], []
    for name in dict.fromkeys(row["mechanism"] for row in rows):
        own = [row for row in rows if row["mechanism"] == name]
        verdicts.append(own[-1]["S"] < own[0]["S"] - 0.01)
        parts.append(f"{name} {own[0]['S']:.2f} → {own[-1]['S']:.2f}")
    widths = sorted({row["width"] for row in rows})
    return grade(all(verdicts), any(verdicts)), (
        f"S from {widths[0]} to {widths[-1]} dimensions: {', '.join(parts)}: flatter, not sparser"
        if not any(verdicts)
        else f"S from {widths[0]} to {widths[-1]} dimensions: {', '.join(parts)}"
    )


CLAIMS = (
    Claim("general-linear", _DOCUMENT, "S of linear attention with non-negative features, from mean and covariance.", "claims", _COMMAND, _closed_form("general")),
    Claim("iid-linear", _DOCUMENT, "The same with independent features.", "claims", _COMMAND, _closed_form("independent")),
    Claim("norm-ratio", _DOCUMENT, "‖q‖₂/‖q‖₁ has the maximum √d.", "claims", _COMMAND, norms),
    Claim("dimensions", _DOCUMENT, "More dimensions make linear attention sparser.", "claims", _COMMAND, dimensions),
    Claim("causal-rank", _DOCUMENT, "Causal linear attention has full rank, so low rank does not explain its weakness.", "claims", _COMMAND, rank),
    Claim("decay", _DOCUMENT, "The closed form of S for decay; it tends to 0 as rows get longer.", "claims", _COMMAND, decay),
)  # fmt: skip
