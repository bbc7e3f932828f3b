"""How many steps of conjugate gradients does magnitude need? Weights and total against the exact solution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsoft.magnitude import weighting

STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
RIDGES = (1e-1, 1e-2, 1e-3, 1e-4)
KEYS, WIDTH = 256, 64
KINDS = ("distinct keys", "crowds, nearly coinciding")


def keys_of(kind: str) -> Tensor:
    """Distinct: standard normal, t = 1. Crowds: eight centres whose 32 members differ by 1e-2."""
    generator = torch.Generator().manual_seed(5)
    if kind == KINDS[0]:
        return torch.randn(KEYS, WIDTH, generator=generator, dtype=torch.float64)
    centres = torch.randn(8, 1, WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(8, KEYS // 8, WIDTH, generator=generator, dtype=torch.float64)
    return (centres + 1e-2 * noise).flatten(0, 1)


def solver(kind: str) -> list[dict[str, Any]]:
    points, rows = keys_of(kind), []
    for eps in RIDGES:
        exact = weighting(points, eps=eps, solver="cholesky")
        for steps in STEPS:
            found = weighting(points, eps=eps, solver="cg", iterations=steps, throw=False)
            error = (found.weights - exact.weights).norm() / exact.weights.norm()
            total = (found.magnitude - exact.magnitude).abs() / exact.magnitude.abs()
            rows.append(
                {"keys": kind, "eps": eps, "steps": steps, "weights": float(error), "total": float(total),
                 "magnitude": float(exact.magnitude)}
            )  # fmt: skip
    return rows
