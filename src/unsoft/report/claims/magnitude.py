"""Document 002: magnitude weights, their solver and their price."""

from __future__ import annotations

from unsoft.report.claims.claim import Claim, Finding, grade
from unsoft.report.results import Missing, Results

_DOCUMENT = "002"
_FACTS = "--only claims"


def _set(results: Results, name: str) -> list[dict]:
    return [row for row in results.rows("magnitude of sets") if row["set"] == name]


def clones(results: Results) -> Finding:
    rows = _set(results, "clones")
    error = max(abs(row["found"] - row["expected"]) / row["expected"] for row in rows)
    return grade(error < 1e-4), ", ".join(f"{row['count']} clones: {row['found']:.4f} each" for row in rows)


def isolated(results: Results) -> Finding:
    found = _set(results, "isolated")[0]["found"]
    return grade(abs(found - 1) < 1e-4), f"weight {found:.6f} of a key far from twenty others"


def additive(results: Results) -> Finding:
    row = _set(results, "far apart")[0]
    return grade(abs(row["found"] - row["expected"]) < 1e-6 * row["expected"]), (
        f"the union has {row['found']:.6f}, its parts together {row['expected']:.6f}"
    )


def bound(results: Results) -> Finding:
    found = _set(results, "bound")[0]["found"]
    return grade(
        found <= 1 + 1e-9
    ), f"largest magnitude over number of points in twenty random sets: {found:.6f}"


def few_steps(results: Results) -> Finding:
    rows = [
        row
        for kind in ("distinct keys", "crowds, nearly coinciding")
        for row in results.rows(f"solver, {kind}")
    ]
    at = {(row["keys"], row["eps"], row["steps"]): row for row in rows}
    distinct, crowds = (at[kind, 0.01, 5] for kind in ("distinct keys", "crowds, nearly coinciding"))
    good = (
        [row["total"] < 0.01 for row in (distinct, crowds)],
        [row["weights"] < 0.01 for row in (distinct, crowds)],
    )
    return grade(all(good[0]) and all(good[1]), distinct["total"] < 0.05), (
        f"after 5 steps at ε = 0.01 the total is off by {distinct['total']:.1%} for distinct keys and {crowds['total']:.1%} for crowds, "
        f"the weights by {distinct['weights']:.0%} and {crowds['weights']:.0%}: enough for the total, not for weights"
    )


def price(results: Results) -> Finding:
    rows = results.rows("price of the solver")
    if len(rows) < 2:
        raise Missing("it takes two lengths to see a growth")
    first, last = rows[0], rows[-1]
    grows = (
        last["ratio"] > 1.5 * first["ratio"]
    )  # the claim is about growth; a constant factor only limits it
    causal = [row for row in results.matching("training") if row["mechanism"] == "magnitude"]
    more = (
        f"; training with causal gates is {causal[-1]['ratio']:.1f} times SDPA at {causal[-1]['length']}"
        if causal
        else ""
    )
    like = not grows and last["ratio"] < 2
    dear = bool(causal) and causal[-1]["ratio"] > 2
    return grade(like and not dear, not grows), (
        f"5 CG steps take {first['ratio']:.2f} of an attention forward pass at N = {first['length']}, {last['ratio']:.2f} at {last['length']}{more}"
    )


def stable(results: Results) -> Finding:
    rows = {row["eps"]: row for row in results.rows("stability")}
    bare, ridge = rows[0.0], rows[0.01]
    worse = bare["change"] is None or bare["change"] > 100 * ridge["change"]
    without = bare["status"] if bare["change"] is None else f"by {bare['change']:.0%}"
    return grade(worse and ridge["change"] < 1e-3), (
        f"if nearly equal keys move by 1e-6, weights move {without} without the ridge and by {ridge['change']:.1g} with ε = 0.01"
    )


CLAIMS = (
    Claim("clones-share", _DOCUMENT, "N identical keys get the weight 1/N each.", "solver", _FACTS, clones),
    Claim("isolated", _DOCUMENT, "An isolated key keeps the weight 1.", "solver", _FACTS, isolated),
    Claim("additive", _DOCUMENT, "Magnitude is additive over sets that are far apart.", "solver", _FACTS, additive),
    Claim("bound", _DOCUMENT, "Magnitude is at most the number of points.", "solver", _FACTS, bound),
    Claim("few-steps", _DOCUMENT, "3 to 5 steps of conjugate gradients find the optimal weights.", "solver", "--only solver", few_steps),
    Claim("price", _DOCUMENT, "The cost is that of standard attention, O(N²).", "cost", "magnitude --only claims --only cost", price),
    Claim("tikhonov", _DOCUMENT, "Tikhonov regularisation keeps the solution stable where keys nearly coincide.", "solver", _FACTS, stable),
)  # fmt: skip
