"""Hijacking: the count of clones of a mediocre key, and the share that a unique key keeps.

One relevant key competes with more and more copies of a less relevant one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unsoft import theory
from unsoft.lab.compare.candidate import WIDTH, Candidate
from unsoft.lab.compare.jobs import Results, RowIterator, Rows
from unsoft.lab.compare.section import BASELINE, FOCUS, ROSIC, Finding, Section
from unsoft.lab.evidence import grade
from unsoft.mechanisms.density import Density
from unsoft.mechanisms.magnitude import Magnitude
from unsoft.modules.build import mechanism
from unsoft.modules.module import Mechanism

CLONES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
RELEVANCE = 20
UNIQUE, CLONE = 1 + math.log(RELEVANCE), 1.0
"""Logits of the two kinds of keys: their exponentials differ by a factor of 20.

A logit of 0 would have no weight under many signed mechanisms.
"""
FAR, CROWD = 40.0, 50
FITTED_TO = CROWD
_CROWDS = (2, 5, 10, 20, FITTED_TO)
_NEAR, _APART = 2 * 0.03**2, 2.0
"""Squared distances per coordinate of near-clones with noise 0.03, and of standard normal keys."""
_SCALES = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
"""Scales of distances among which the fit of a gate chooses."""
_OPEN = 0.5
"""Minimum gate of a key without near-duplicates: closing everything is no solution."""


SECTION = Section(order=20, group=FOCUS, question="Is it hijacked?", about=__doc__)


@SECTION.each(0.1, "softmax")
def hijack(candidate: Candidate) -> RowIterator:
    """Measure shares under the initial mechanism, of magnitude and density also fitted, and by theory."""
    measured = [("measured", candidate)]
    if _has_gate(candidate):
        measured.append(("fitted", GatedCandidate(candidate.label, candidate.mechanism, gate=fitted_gate())))
    for kind, one in measured:
        for clones in CLONES:
            yield {"kind": kind, "clones": clones, "share": measured_share(one, clones)}
    for clones, share in zip(CLONES, _theory(candidate), strict=False):
        yield {"kind": "theory", "clones": clones, "share": share}


def _has_gate(candidate: Candidate) -> bool:
    if candidate.formula is not None:
        return False
    return any(isinstance(part, (Magnitude, Density)) for part in candidate.module(2).parts)


def weights_of(candidate: Candidate, clones: int, unique: float = UNIQUE, clone: float = CLONE) -> Tensor:
    """Return |a| of a row over one key, first, and ``clones`` equal ones, far away from it."""
    query = torch.zeros(1, 1, WIDTH, dtype=torch.float64)
    query[..., 0] = math.sqrt(WIDTH)
    key = torch.zeros(1, clones + 1, WIDTH, dtype=torch.float64)
    key[:, :, 0] = clone
    key[:, 0, 0] = unique
    key[:, :, 1] = FAR
    key[:, 0, 1] = -FAR
    return candidate.weights(query, key)[0, 0].abs()


def measured_share(candidate: Candidate, clones: int, unique: float = UNIQUE, clone: float = CLONE) -> float:
    """Return |a_unique| / sum |a|."""
    row = weights_of(candidate, clones, unique, clone)
    total = float(row.sum())
    return float(row[0]) / total if total else 0.0


def _theory(candidate: Candidate) -> list[float]:
    """Return the shares by theory, or none if there is no theory of the mechanism."""
    at: dict[str, Any] = {"unique": UNIQUE, "clone": CLONE}
    try:
        if candidate.formula is not None:
            if candidate.formula.uses & {"i", "j"}:
                return []
            return theory.hijack_share(candidate.formula, CLONES, **at).tolist()
        layer = candidate.module(max(CLONES) + 1)
        if isinstance(layer, Density) and layer.clone_theory is not None:
            return theory.density_hijack(CLONES, **at, **layer.clone_theory).tolist()
        if isinstance(layer, Magnitude) and layer.clone_theory is not None:
            return theory.magnitude_hijack(CLONES, **at, **layer.clone_theory).share.tolist()
    except ValueError:
        pass
    return []


@SECTION.fact(0.1)
def example() -> RowIterator:
    """Measure the example of Rosić 2026: relevance 20 against 50 keys of relevance 1."""
    share = measured_share(Candidate("softmax", "softmax"), CROWD, unique=math.log(20), clone=0.0)
    yield {"mechanism": "softmax", "clones": CROWD, "share": share}


class Gate(NamedTuple):
    """The gate sigmoid(beta w + gamma) of a key's magnitude weight w; t is the scale of distances."""

    beta: float
    gamma: float
    t: float
    eps: float = 0.1

    def of(self, weight: float) -> float:
        return 1 / (1 + math.exp(-(self.beta * weight + self.gamma)))


@dataclass(frozen=True)
class GatedCandidate(Candidate):
    """A mechanism that gates its keys, with these parameters; ``where`` is an option of magnitude. Density
    gets those of :func:`fitted_density`."""

    gate: Gate = Gate(1.0, 0.0, 1.0)
    where: str | None = None

    def module(self, length: int, heads: int = 1, width: int = WIDTH) -> Mechanism:
        options: dict[str, Any] = {} if self.where is None else {"where": self.where}
        layer = mechanism(self.mechanism, heads=heads, head_dim=width, **options)
        for part in layer.parts:
            if isinstance(part, Magnitude):
                part.set_key_gate(beta=self.gate.beta, gamma=self.gate.gamma, t=self.gate.t)
            elif isinstance(part, Density):
                part.set_density(**fitted_density())
        return layer


@cache
def fitted_gate(*, causal: bool = False) -> Gate:
    """Fit beta, gamma and t so that crowds count as one and distinct keys as many, as far as possible.

    m keys count as m g(w_m) / g(w_1), with w_m the weight of each of them. The causal gate of a key has its
    weight on arrival, so they count as (g(w_1) + ... + g(w_m)) / g(w_1). For m = 2 to 50 near-clones, with
    noise of 0.03 in every coordinate, it should be 1; for m keys as far apart as random ones, it should be m.
    The squares of the logarithmic errors are minimised over a grid of the three, under the condition that a
    key without near-duplicates keeps a gate of at least a half.

    >>> gate = fitted_gate()
    >>> 0.49 < gate.of(1 / 1.1), gate.of(1 / 50.1) < 0.05
    (True, True)
    """
    sizes = torch.tensor(_CROWDS, dtype=torch.float64)
    beta_and_gamma = (torch.linspace(*ends, dtype=torch.float64) for ends in ((1, 20, 96), (-12, 2, 71)))
    t, beta, gamma = torch.meshgrid(_SCALES, *beta_and_gamma, indexing="ij")
    eps = Gate(0, 0, 0).eps
    alone = logsigmoid(beta / (1 + eps) + gamma)
    errors = torch.where(alone.exp() < _OPEN, torch.inf, 0.0)
    members = torch.arange(1.0, max(_CROWDS) + 1, dtype=torch.float64) if causal else sizes
    for distance, target in ((_NEAR, torch.zeros_like(sizes)), (_APART, sizes.log())):
        alike = torch.exp(-t * distance)[..., None]
        weights = 1 / (1 + eps + (members - 1) * alike)
        gates = logsigmoid(beta[..., None] * weights + gamma[..., None])
        total = gates.logcumsumexp(-1)[..., [m - 1 for m in _CROWDS]] if causal else sizes.log() + gates
        errors = errors + (total - alone[..., None] - target).square().mean(-1)
    best = errors.argmin()
    return Gate(*(float(x.flatten()[best]) for x in (beta, gamma, t)))


@cache
def fitted_density() -> dict[str, float]:
    """Fit p and t of density as :func:`fitted_gate` fits the gate: m keys count as m / rho^p.

    >>> fitted_density()["p"] > 0.95
    True
    """
    sizes = torch.tensor(_CROWDS, dtype=torch.float64)
    t, p = torch.meshgrid(_SCALES, torch.linspace(0.01, 0.99, 99, dtype=torch.float64), indexing="ij")
    errors = torch.zeros_like(p)
    for distance, target in ((_NEAR, torch.zeros_like(sizes)), (_APART, sizes.log())):
        density = 1 + (sizes - 1) * torch.exp(-t * distance)[..., None]
        errors += (sizes.log() - p[..., None] * density.log() - target).square().mean(-1)
    best = errors.argmin()
    return {"p": float(p.flatten()[best]), "t": float(t.flatten()[best])}


@SECTION.lines(
    "hijack",
    "Share of the unique key",
    x=("clones", "clones"),
    y=("share", "share of the unique key"),
    log_x=True,
    y_domain=[0, 1],
    joined=True,
    reference=(RELEVANCE / (RELEVANCE + 1), "clones counted once"),
)
def _shares(results: Results) -> Rows:
    """A key of relevance 20 against clones of relevance 1, at initialisation.

    Lines: theory where there is one; dots: measured. Dotted: what the key keeps if all clones together count
    as one.
    """
    return results.each("hijack")


def effective_count(results: Results, label: str, kind: str = "measured") -> float | None:
    """Return what 50 clones count as, odds(50) / odds(1): at initialisation, or ``kind="fitted"``.

    A mechanism without any weight gets the limit.
    """
    rows = results.get("hijack", label, kind=kind)
    if not rows and label == BASELINE:  # it has no gate that could be fitted
        rows = results.get("hijack", label, kind="measured")
    share = {row["clones"]: row["share"] for row in rows}
    if not share:
        return None
    if not 0 < share[1] < 1 or not share[CROWD] > 0:
        return float(CROWD)
    return float(min((1 / share[CROWD] - 1) / (1 / share[1] - 1), CROWD))


def from_one(count: float) -> float:
    """Return how many times more or less than one."""
    return math.inf if count <= 0 else max(count, 1 / count)


@SECTION.theorem(ROSIC, "Relevance 20 against 50 keys of relevance 1 leaves 0.286 and 0.714.")
def _example(results: Results) -> Finding:
    """20/70 to 1e-6."""
    share = results.rows("example")[0]["share"]
    return grade(abs(share - 20 / 70) < 1e-6), f"measured {share:.4f} and {1 - share:.4f}"


@SECTION.definition(ROSIC, "Under softmax many mediocre copies drown one relevant key.")
def _hijacking(results: Results) -> Finding:
    """The share of the unique key is above 0.9 against one clone and below 0.05 against 1000."""
    shares = _softmax_shares(results)
    return grade(shares[1] > 0.9 and shares[1000] < 0.05), (
        f"a key 20 times as relevant keeps {shares[1]:.3f} against 1 clone, {shares[50]:.3f} against 50,"
        f" {shares[1000]:.3f} against 1000"
    )


def _softmax_shares(results: Results) -> dict[int, float]:
    return {row["clones"]: row["share"] for row in results.rows("hijack", "softmax", kind="measured")}


@SECTION.definition(ROSIC, "Attention is wasted on the same feature fifty times.")
def _wasted_capacity(results: Results) -> Finding:
    """More than half of softmax's mass lies on copies of a key, beyond the first."""
    copies = (1 - _softmax_shares(results)[CROWD]) * (CROWD - 1) / CROWD
    return grade(copies > 0.5), f"{copies:.1%} of softmax's mass goes to copies of a key that it already has"


_CLONES: dict[str, Any] = {"yes": CROWD**0.25, "partly": CROWD**0.5, "low_is_good": True}
_CLONES |= {"limit": float(CROWD), "badness": from_one, "unit": "clones"}


@SECTION.column("clones", f"{CROWD} clones, initial", **_CLONES)
def _initial(results: Results, label: str) -> float | None:
    """Odds of 50 clones against a unique key over the odds of one, as the mechanism is initialised: 1 counts
    as one, 50 is hijacked, below 1 the crowd is erased.

    1 is the aim, 50 what softmax does, and what an output of zeros and random weights are given. On a
    logarithmic scale: yes within a quarter of the way from 1, partly within half of it, in either direction.
    Signed mechanisms can get a low number without recognising clones: their weights pass through 0 at some
    count, as the chart shows.
    """
    return effective_count(results, label)


@SECTION.column(
    "clones_fitted", f"{CROWD} clones, fitted", need="count duplicates once (gate fitted)", **_CLONES
)
def _fitted(results: Results, label: str) -> float | None:
    """Odds of 50 clones against a unique key over the odds of one, with β, γ and t of its gate (density: p
    and t) fitted to crowds of up to 50, bidirectional and without positions; empty for mechanisms without a
    gate on keys: 1 counts as one, 50 is hijacked, below 1 the crowd is erased.

    1 is the aim, 50 what softmax does, and what an output of zeros and random weights are given. On a
    logarithmic scale: yes within a quarter of the way from 1, partly within half of it, in either direction.
    Signed mechanisms can get a low number without recognising clones: their weights pass through 0 at some
    count, as the chart shows.
    """
    return effective_count(results, label, kind="fitted")
