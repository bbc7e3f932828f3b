"""Rows of plain numbers for the tables, files and charts of ``unsoft theory``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from unsoft import theory
from unsoft.formula import Formula
from unsoft.theory.closed_forms import CLOSED_FORMS

Rows = list[dict[str, Any]]
CLOSED_GAMMAS = [0.02 * k for k in range(1, 251)]
CLONES = sorted({round(10 ** (k / 8)) for k in range(33)})
UNIQUE, CLONE = 3.0, 1.0  # logits; a clone that weighs something for every mechanism
LENGTHS = (64, 1024, 16384)
DIMENSIONS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_INFINITE = "infinite"


@dataclass(frozen=True)
class TheorySubject:
    """A mechanism to show: by name, using its closed form if there is one, or a custom formula."""

    label: str
    formula: Formula
    n: int
    named: bool

    @property
    def closed(self) -> bool:
        return self.named and self.label in CLOSED_FORMS

    @property
    def mechanism(self) -> str | Formula:
        """The argument for functions of :mod:`unsoft.theory`."""
        return self.label if self.closed else self.formula

    def sparsity(self, beta: Any, gamma: Any, **options: Any) -> torch.Tensor:
        return theory.sparsity(self.mechanism, beta, gamma, n=self.n, **options)


def sparsity_rows(subjects: list[TheorySubject], betas: list[float], gammas: list[float]) -> Rows:
    """Return S of every subject at every (beta, gamma)."""
    grid = torch.tensor(betas, dtype=torch.float64)[:, None]
    rows = []
    for subject in subjects:
        values = subject.sparsity(grid, gammas).tolist()
        how = "closed form" if subject.closed else "quadrature"
        rows += [
            {"mechanism": subject.label, "beta": beta, "gamma": gamma, "S": value, "found by": how}
            for beta, line in zip(betas, values, strict=True)
            for gamma, value in zip(gammas, line, strict=True)
        ]
    return rows


def closed_rows(name: str, betas: tuple[float, ...]) -> Rows:
    """Return S against gamma for some beta in closed form, as in Su (2023)."""
    values = theory.sparsity(name, torch.tensor(betas, dtype=torch.float64)[:, None], CLOSED_GAMMAS)
    return [
        {"beta": beta, "gamma": round(gamma, 2), "S": value}
        for beta, line in zip(betas, values.tolist(), strict=True)
        for gamma, value in zip(CLOSED_GAMMAS, line, strict=True)
    ]


def hijack_rows(subjects: list[TheorySubject]) -> Rows:
    """Return the share of a unique key against the number of clones; for magnitude also at the output."""
    rows = []
    for subject in subjects:
        try:
            shares = theory.hijack_share(subject.formula, CLONES, unique=UNIQUE, clone=CLONE)
        except ValueError:  # its weight at the logit of a clone is 0: there is nothing to draw
            continue
        rows += _hijack(subject.label, shares, shares, 1 - shares)
    gates: dict[str, dict[str, Any]] = {
        "sigmoid(8 w - 4)": {"gate": "sigmoid", "slope": 8.0, "offset": -4.0},
        "w": {"gate": "weight"},
    }
    for name, gate in gates.items():
        for target in ("values", "mass"):
            hijack = theory.magnitude_hijack(CLONES, unique=UNIQUE, clone=CLONE, on=target, **gate)
            rows += _hijack(f"magnitude on {target}, gate {name}", hijack.share, hijack.unique, hijack.clones)
    return rows


def _hijack(label: str, share: torch.Tensor, unique: torch.Tensor, clones: torch.Tensor) -> Rows:
    columns = zip(CLONES, share.tolist(), unique.tolist(), clones.tolist(), strict=True)
    return [
        {"mechanism": label, "clones": m, "share": s, "unique reaches output": u, "clones reach output": c}
        for m, s, u, c in columns
    ]


def length_rows(subject: TheorySubject) -> Rows:
    """Return the mean S of random finite rows and of an infinite row."""
    gammas = [0.25 * k for k in range(1, 17)]
    infinite = subject.sparsity(0.0, gammas).tolist()
    rows = [
        {"keys": _INFINITE, "gamma": gamma, "S": value, "error": 0.0, "at least": 0.0}
        for gamma, value in zip(gammas, infinite, strict=True)
    ]
    for length in LENGTHS:
        for gamma in gammas:
            sampled = theory.empirical_sparsity(subject.formula, 0.0, gamma, length, rows=64, n=subject.n)
            row = {"keys": str(length), "gamma": gamma, "S": sampled.mean, "error": sampled.error}
            rows.append(row | {"at least": 1 / math.sqrt(length)})
    return rows


def dimension_rows(subjects: list[TheorySubject]) -> Rows:
    """Return S for keys on a low-dimensional sphere, relative to Gaussian keys."""
    rows = []
    for subject in subjects:
        gaussian = float(subject.sparsity(0.0, 1.0))
        for dim in DIMENSIONS:
            value = float(subject.sparsity(0.0, 1.0, dim=dim))
            row = {"mechanism": subject.label, "dimensions": dim, "S": value}
            rows.append(row | {"of gaussian": value / gaussian})
    return rows
