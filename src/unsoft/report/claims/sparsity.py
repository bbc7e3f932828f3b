"""Document 001: the closed forms of S for exp, relu² and identity, and what follows from them."""

from __future__ import annotations

import math

from unsoft.report.claims.claim import Claim, Finding, grade
from unsoft.report.results import Missing, Results

_DOCUMENT = "001"
_CLOSE = 0.02


def _pairs(results: Results, name: str) -> list[tuple[float, float, float, float]]:
    """beta, gamma, measured, theory wherever both exist."""
    rows = results.rows("focus", name)
    theory = {(row["beta"], row["gamma"]): row["S"] for row in rows if row["kind"] == "theory"}
    found = [
        (row["beta"], row["gamma"], row["S"], theory[at])
        for row in rows
        if row["kind"] == "measured" and (at := (row["beta"], row["gamma"])) in theory
    ]
    if not found:
        raise Missing(f"no point of {name} has both theory and measurement")
    return found


def exponential(results: Results) -> Finding:
    pairs = _pairs(results, "softmax")
    near = max(abs(found - math.exp(-(gamma**2) / 2)) for _, gamma, found, _ in pairs if gamma <= 1)
    wide = [(gamma, found) for beta, gamma, found, _ in pairs if beta == 0 and gamma == 3]
    tail = (
        f"; at gamma = 3 a finite row still has {wide[0][1]:.3f}, the formula {math.exp(-4.5):.3f}"
        if wide
        else ""
    )
    leaves = bool(wide) and wide[0][1] > 2 * math.exp(-4.5)
    return grade(
        near < _CLOSE and not leaves, near < _CLOSE
    ), f"largest distance for gamma ≤ 1: {near:.4f}{tail}"


def rectified(results: Results) -> Finding:
    worst = max(_pairs(results, "relu2"), key=lambda at: abs(at[2] - at[3]))
    error = abs(worst[2] - worst[3])
    return grade(error < _CLOSE, error < 3 * _CLOSE), (
        f"largest distance {error:.4f}, at beta = {worst[0]:g}, gamma = {worst[1]:g} ({worst[2]:.3f} measured, {worst[3]:.3f} theory)"
    )


def plain(results: Results) -> Finding:
    worst = max(_pairs(results, "identity"), key=lambda at: abs(at[2] - at[3]))
    error = abs(worst[2] - worst[3])
    return grade(
        error < _CLOSE
    ), f"largest distance {error:.4f}, at beta = {worst[0]:g}, gamma = {worst[1]:g}"


def negative_beta(results: Results) -> Finding:
    found = [row for row in results.rows("focus", "relu2") if row["kind"] == "measured"]
    above = min(row["S"] for row in found if row["beta"] >= 0)
    below = min(row["S"] for row in found if row["beta"] < 0)
    return grade(above > 0.38 and below < 0.15), (
        f"lowest measured S: {above:.3f} for beta ≥ 0 (theory 1/√6 = 0.408), {below:.3f} for beta < 0"
    )


def floor(results: Results) -> Finding:
    rows = results.rows("focus", "identity")
    measured = min(row["S"] for row in rows if row["kind"] == "measured")
    theory = min(row["S"] for row in rows if row["kind"] == "theory")
    bound = math.sqrt(2 / math.pi)
    return grade(theory >= bound - 1e-9 and abs(measured - bound) < _CLOSE), (
        f"lowest S: {theory:.4f} by theory, {measured:.4f} measured; √(2/π) = {bound:.4f}"
    )


def even(results: Results) -> Finding:
    rows = results.rows("focus", "identity")
    gaps = {}
    for kind in ("theory", "measured"):
        at = {(row["beta"], row["gamma"]): row["S"] for row in rows if row["kind"] == kind}
        gaps[kind] = max(abs(s - at[-beta, gamma]) for (beta, gamma), s in at.items() if (-beta, gamma) in at)
    return grade(gaps["theory"] < 1e-9 and gaps["measured"] < _CLOSE), (
        f"largest |S(beta) - S(-beta)|: {gaps['theory']:.1g} by theory, {gaps['measured']:.4f} measured"
    )


def linear_is_flat(results: Results) -> Finding:
    lowest = {
        name: min(
            row["S"] for row in results.rows("focus", name) if row["kind"] == "measured" and row["beta"] == 0
        )
        for name in ("softmax", "linear-relu")
    }
    return grade(lowest["linear-relu"] > 2 * lowest["softmax"]), (
        f"lowest S for gamma up to 4: softmax {lowest['softmax']:.3f}, linear attention with relu {lowest['linear-relu']:.3f}"
    )


def _command(names: str) -> str:
    return f"{names} --only focus"


CLAIMS = (
    Claim("exp", _DOCUMENT, "Softmax: S = exp(-gamma²/2); it can be as sparse as one likes.", "focus", _command("softmax"), exponential),
    Claim("relu2", _DOCUMENT, "The closed form of S for relu².", "focus", _command("relu2"), rectified),
    Claim("relu2-beta", _DOCUMENT, "relu² becomes sparse only if beta < 0.", "focus", _command("relu2"), negative_beta),
    Claim("identity", _DOCUMENT, "The closed form of S for the plain logit.", "focus", _command("identity"), plain),
    Claim("identity-floor", _DOCUMENT, "The plain logit has a high floor: S ≥ 0.798.", "focus", _command("identity"), floor),
    Claim("identity-even", _DOCUMENT, "For the plain logit S is even in beta.", "focus", _command("identity"), even),
    Claim("linear-flat", _DOCUMENT, "Linear attention is harder to focus than softmax.", "focus", _command("softmax linear-relu"), linear_is_flat),
)  # fmt: skip
