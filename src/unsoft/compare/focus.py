"""Can it focus? S of rows measured on real attention weights, and the theory of infinitely many keys beside it."""

from __future__ import annotations

import math
from typing import Any

import torch

from unsoft import measure, theory
from unsoft.compare.level import Level
from unsoft.compare.subject import WIDTH, Subject

BETAS = (-2.0, -1.0, 0.0, 1.0, 2.0)
LINE = tuple(round(0.1 * k, 10) for k in range(1, 41))
POINTS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
SEED = 1


def focus(subject: Subject, level: Level) -> list[dict[str, Any]]:
    """Theory at every gamma of the line, measurements at some of them; families have measurements at beta = 0 only."""
    return _theory(subject, level.keys) + _measured(subject, level)


def _theory(subject: Subject, keys: int) -> list[dict[str, Any]]:
    if subject.formula is None or subject.formula.uses & {"i", "j"}:
        return []
    named = isinstance(subject.mechanism, str) and subject.mechanism in (
        "softmax",
        "cog",
        "sinh",
        "relu",
        "relu2",
        "identity",
    )
    gammas, rows = torch.tensor(LINE, dtype=torch.float64), []
    for beta in BETAS:
        try:
            found = theory.sparsity(subject.mechanism if named else subject.formula, beta, gammas, n=keys)
        except ValueError as problem:
            return [
                {
                    "kind": "no theory",
                    "beta": 0.0,
                    "gamma": 0.0,
                    "S": None,
                    "note": str(problem).splitlines()[0],
                }
            ]
        rows += [
            {"kind": "theory", "beta": beta, "gamma": gamma, "S": s}
            for gamma, s in zip(LINE, found.tolist(), strict=True)
        ]
    return rows


def _measured(subject: Subject, level: Level) -> list[dict[str, Any]]:
    rows = []
    pointwise = subject.formula is not None
    width = 16 if pointwise else WIDTH  # a formula sees nothing but logits, whatever the keys' width
    for beta in BETAS if pointwise else (0.0,):
        for gamma in POINTS:
            found = measured_sparsity(subject, beta, gamma, level.keys, level.rows, width)
            if len(found) > 1:
                error = float(found.std() / math.sqrt(len(found)))
                rows.append(
                    {
                        "kind": "measured",
                        "beta": beta,
                        "gamma": gamma,
                        "S": float(found.mean()),
                        "error": error,
                    }
                )
    return rows


def measured_sparsity(
    subject: Subject, beta: float, gamma: float, keys: int, rows: int, width: int = WIDTH
) -> torch.Tensor:
    """S of ``rows`` rows whose keys are N(mu, 1) in ``width`` dimensions, with |q| = gamma and q . mu = beta.

    Rows without any weight, which have no S, are left out.
    """
    generator = torch.Generator().manual_seed(SEED)
    direction = torch.randn(rows, 1, width, generator=generator)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    found = []
    for at in direction.split(max(1, 2**20 // keys)):
        key = torch.randn(len(at), keys, width, generator=generator) + (beta / gamma) * at
        with torch.no_grad():
            weights = subject.weights(gamma * at, key, scale=1.0)[:, 0]
        found.append(measure.sparsity(weights)[(weights != 0).any(-1)])
    return torch.cat(found).double()
