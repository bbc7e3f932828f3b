"""Focus: the sparsity S of rows, measured on real attention weights beside the theory of long rows.

S = E|a| / √(E a²) over a row whose logits are N(beta, gamma²): 1 if the row is even, near 0 if all is on one
key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unsoft import measure, theory
from unsoft.lab.compare.candidate import WIDTH, Candidate, normals
from unsoft.lab.compare.jobs import Missing, Results, RowIterator, Rows, matching
from unsoft.lab.compare.section import FOCUS, SU, Finding, Section
from unsoft.lab.evidence import grade
from unsoft.lab.report.figure import ChartControl, Figure, by_value

BETAS = (-2.0, -1.0, 0.0, 1.0, 2.0)
LINE = tuple(round(0.1 * k, 10) for k in range(1, 41))
POINTS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
SEED = 1
_CLOSE, _RELATIVE, _EXACT = 0.02, 0.05, 1e-6
"""Measurement and theory agree if they are no further apart."""


_CONTROL = ChartControl("beta", "beta, mean of the logits", [(beta, f"{beta:g}") for beta in BETAS])
SECTION = Section(order=10, group=FOCUS, question="Can it focus?", about=__doc__, controls=[_CONTROL])


@SECTION.each(lambda level: level.keys * level.rows * 3e-5, "softmax", "relu2", "identity")
def focus(candidate: Candidate, keys: int, rows: int) -> RowIterator:
    """Compute S by theory at every gamma of the line and measure it at some; families only at beta = 0."""
    yield from _theory(candidate, keys)
    pointwise = candidate.formula is not None
    width = 16 if pointwise else WIDTH  # a formula depends on logits only, whatever the keys' width
    for beta, gamma in itertools.product(BETAS if pointwise else (0.0,), POINTS):
        values = measured_sparsity(candidate, beta, gamma, keys, rows, width)
        if len(values) > 1:
            row = {"kind": "measured", "beta": beta, "gamma": gamma, "S": float(values.mean())}
            yield row | {"error": float(values.std() / math.sqrt(len(values)))}


def _theory(candidate: Candidate, keys: int) -> Rows:
    if candidate.formula is None or candidate.formula.uses & {"i", "j"}:
        return []
    betas, gammas = (torch.tensor(x, dtype=torch.float64) for x in (BETAS, LINE))
    try:
        table = theory.sparsity(candidate.mechanism, betas[:, None], gammas, n=keys).flatten().tolist()
    except ValueError as problem:
        why = str(problem).splitlines()[0]
        return [{"kind": "no theory", "beta": 0.0, "gamma": 0.0, "S": None, "note": why}]
    points = zip(itertools.product(BETAS, LINE), table, strict=True)
    return [{"kind": "theory", "beta": beta, "gamma": gamma, "S": s} for (beta, gamma), s in points]


def measured_sparsity(
    candidate: Candidate, beta: float, gamma: float, keys: int, rows: int, width: int = WIDTH
) -> torch.Tensor:
    """Measure S of rows whose keys are N(mu, 1) in ``width`` dimensions, with |q| = gamma and q . mu = beta.

    Rows without any weight, which have no S, are left out.
    """
    normal = normals(SEED, torch.float32)
    direction = normal(rows, 1, width)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    parts = []
    for at in torch.split(direction, max(1, 2**20 // keys)):
        key = normal(len(at), keys, width) + (beta / gamma) * at
        weights = candidate.weights(gamma * at, key, scale=1.0)[:, 0]
        parts.append(measure.sparsity(weights)[(weights != 0).any(-1)])
    return torch.cat(parts).double()


_ALONE = (
    ("relu2", "relu²: the first figure of Su 2023", "Only for beta < 0 does S come near 0.", [0, 1]),
    (
        "identity",
        "The plain logit: the second figure of Su 2023",
        "S never falls below √(2/π) = 0.798, and is even in beta.",
        [0.78, 1],
    ),
    (
        "softmax",
        "Softmax",
        "exp(-gamma²/2) for every beta, until the row is too short for such wide logits.",
        [0, 1],
    ),
)


@SECTION.lines(
    "focus",
    "All mechanisms, for the chosen beta",
    x=("gamma", "gamma, spread of the logits"),
    y=("S", "S"),
    y_domain=[0, 1],
    choose={"beta": 0},
)
def _all(results: Results) -> Rows:
    """1: even, 0: all on one key. Lines: theory; dots: measured. Families without a formula are measured at
    beta = 0.
    """
    lines, dots = _split(results.each("focus"))
    return lines + dots


@SECTION.figures
def figures(results: Results) -> Iterator[Figure]:
    axes: dict[str, Any] = {"x_title": "gamma, spread of the logits", "y_title": "S"}
    for name, title, note, domain in _ALONE:
        lines, dots = _split(results.get("focus", name))
        if lines and dots:
            chart = by_value(lines, "gamma", "S", "beta", dots=dots, y_domain=domain, **axes)
            note += " Lines: theory; dots: measured."
            yield Figure(f"focus-{name}", title, note, lines + dots, chart)


def _split(rows: Rows) -> tuple[Rows, Rows]:
    """Return the rows of theory, and those of measurements."""
    kept = [{key: x for key, x in row.items() if key not in ("error", "note")} for row in rows]
    return matching(kept, kind="theory"), matching(kept, kind="measured")


def _pairs(results: Results, name: str) -> list[tuple[float, float, float, float]]:
    """Return beta, gamma, measured S and S by theory wherever both exist."""
    theory, measured = (_points(results, name, kind) for kind in ("theory", "measured"))
    pairs = [(*at, s, theory[at]) for at, s in measured.items() if at in theory]
    if not pairs:
        raise Missing(f"no point of {name} has both theory and measurement")
    return pairs


def _points(results: Results, name: str, kind: str) -> dict[tuple[float, float], float]:
    """Return S by beta and gamma."""
    return {(row["beta"], row["gamma"]): row["S"] for row in results.rows("focus", name, kind=kind)}


def integral(weight: Callable[[torch.Tensor], torch.Tensor], beta: float, gamma: float) -> float:
    """Return S of f(x) for x ~ N(beta, gamma^2), in an infinitely long row, by the trapezoidal rule.

    Independent of :mod:`unsoft.theory`. The range of 12 deviations is moved by 2 gamma, because exp(2 x)
    times the density has its mass there.

    >>> abs(integral(torch.exp, 1.0, 2.0) / math.exp(-2) - 1) < 1e-9
    True
    """
    z = torch.linspace(-12, 12 + 2 * gamma, 20_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    values = weight(beta + gamma * z)
    mean, square = (float(torch.trapezoid(x * density, z)) for x in (values.abs(), values.square()))
    return mean / math.sqrt(square)


@SECTION.theorem(SU, "Softmax: S = exp(−gamma²/2); it can be as sparse as one likes.")
def _exp(results: Results) -> Finding:
    """S by theory, that of an infinitely long row, agrees with exp(−gamma²/2) and with numeric integration to
    1e-6 of it at every measured point, and falls below 0.001. Rows of finite length are another claim.
    """
    pairs = _pairs(results, "softmax")
    error = max(
        abs(s / other - 1)
        for beta, gamma, _, s in pairs
        for other in (math.exp(-(gamma**2) / 2), integral(torch.exp, beta, gamma))
    )
    least = min(s for *_, s in pairs)
    return grade(error < _EXACT and least < 1e-3), (
        f"largest relative distance from exp(−gamma²/2) and from the integral, {len(pairs)} points:"
        f" {error:.1g}; lowest S {least:.1g}"
    )


@SECTION.theorem(SU, "The closed form of S for relu².")
def _relu2(results: Results) -> Finding:
    """The formula, that of an infinitely long row, agrees with numeric integration to 1e-6 of it at every
    measured point. Rows of finite length are another claim.
    """
    pairs = _pairs(results, "relu2")
    error = max(
        abs(s / integral(lambda x: x.relu().square(), beta, gamma) - 1) for beta, gamma, _, s in pairs
    )
    return grade(error < _EXACT), (
        f"largest relative distance of the closed form from the integral, {len(pairs)} points: {error:.1g}"
    )


@SECTION.experiment(SU, "The formulas of infinitely long rows describe rows of real length.")
def _finite_rows(results: Results) -> Finding:
    """S of rows as long as the comparison's, softmax and relu²: supported if it is within 5 % of the
    formula at every measured point; partly if at most points.

    Refuted: Most points are more than 5 % away.
    """
    errors, parts = [], []
    for name in ("softmax", "relu2"):
        pairs = _pairs(results, name)
        own = [abs(s - expected) / expected for _, _, s, expected in pairs]
        beta, gamma, s, expected = pairs[own.index(max(own))]
        parts.append(
            f"{name} is within 5 % at {sum(x < _RELATIVE for x in own)} of {len(own)} points, farthest at"
            f" beta = {beta:g}, gamma = {gamma:g} ({s:.4f} measured, {expected:.4f} by the formula)"
        )
        errors += own
    near = sum(error < _RELATIVE for error in errors)
    return grade(near == len(errors), 2 * near > len(errors)), "; ".join(parts)


@SECTION.theorem(SU, "relu² becomes sparse only if beta < 0.")
def _relu2_beta(results: Results) -> Finding:
    """Lowest measured S above 0.38 for beta ≥ 0 (theory: 1/√6 = 0.408) and below 0.15 for beta < 0."""
    measured = _points(results, "relu2", "measured")
    above = min(s for (beta, _), s in measured.items() if beta >= 0)
    below = min(s for (beta, _), s in measured.items() if beta < 0)
    return grade(above > 0.38 and below < 0.15), (
        f"lowest measured S: {above:.3f} for beta ≥ 0 (theory 1/√6 = 0.408), {below:.3f} for beta < 0"
    )


@SECTION.theorem(SU, "The closed form of S for the plain logit.")
def _identity(results: Results) -> Finding:
    """Measured and theory agree to 0.02."""
    worst = max(_pairs(results, "identity"), key=lambda at: abs(at[2] - at[3]))
    error = abs(worst[2] - worst[3])
    return grade(error < _CLOSE), (
        f"largest distance {error:.4f}, at beta = {worst[0]:g}, gamma = {worst[1]:g}"
    )


@SECTION.theorem(SU, "The plain logit has a high floor: S ≥ 0.798.")
def _identity_floor(results: Results) -> Finding:
    """Lowest S by theory at least √(2/π) to 1e-9, lowest measured within 0.02 of it."""
    theory, measured = (min(_points(results, "identity", kind).values()) for kind in ("theory", "measured"))
    bound = math.sqrt(2 / math.pi)
    return grade(theory >= bound - 1e-9 and abs(measured - bound) < _CLOSE), (
        f"lowest S: {theory:.4f} by theory, {measured:.4f} measured; √(2/π) = {bound:.4f}"
    )


@SECTION.definition(SU, "For the plain logit S is even in beta.")
def _identity_even(results: Results) -> Finding:
    """S(beta) and S(−beta) differ by less than 1e-9 in theory and 0.02 measured."""
    gaps = {}
    for kind in ("theory", "measured"):
        at = _points(results, "identity", kind)
        gaps[kind] = max(abs(s - at[-beta, gamma]) for (beta, gamma), s in at.items() if (-beta, gamma) in at)
    return grade(gaps["theory"] < 1e-9 and gaps["measured"] < _CLOSE), (
        f"largest |S(beta) - S(-beta)|: {gaps['theory']:.1g} by theory, {gaps['measured']:.4f} measured"
    )
