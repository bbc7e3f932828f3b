"""The numbers of docs/magnitude.md: ``python docs/generate/magnitude.py``, a few seconds."""

from __future__ import annotations

import math

import torch

import unsoft
from unsoft.magnitude import weighting

CROWDS, MEMBERS, WIDTH = 10, 30, 16


def keys(noise: float) -> torch.Tensor:
    """10 crowds of 30 keys, each key ``noise`` away from its crowd's place in every coordinate, and 20 keys
    alone.
    """
    g = torch.Generator().manual_seed(0)
    places = torch.randn(CROWDS, WIDTH, generator=g, dtype=torch.float64).repeat(MEMBERS, 1)
    crowded = places + noise * torch.randn(places.shape, generator=g, dtype=torch.float64)
    return torch.cat([crowded, torch.randn(20, WIDTH, generator=g, dtype=torch.float64)])


def row(*cells: object) -> None:
    print("| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells) + " |")


def ridge() -> None:
    print("\n## eps, exact solver\n")
    row("noise", "eps", "magnitude", "smallest weight", "largest weight", "largest crowd total / smallest")
    row(*["---"] * 6)
    for noise in (0.3, 0.03, 0.003):
        for eps in (1e-6, 1e-3, 0.01, 0.1):
            w = weighting(keys(noise), 1.0, eps, "cholesky").weights
            totals = torch.stack([w[: CROWDS * MEMBERS][c::CROWDS].sum() for c in range(CROWDS)])
            row(
                noise,
                eps,
                float(w.sum()),
                float(w.min()),
                float(w.max()),
                f"{totals.max():.3g} / {totals.min():.3g}",
            )


def steps() -> None:
    print("\n## iterations of cg, eps = 0.1\n")
    row(
        "noise",
        "steps",
        "residual",
        "error of the magnitude",
        "largest error of a weight",
        "largest error of a gate",
    )
    row(*["---"] * 6)
    for noise in (0.3, 0.003):
        exact = weighting(keys(noise), 1.0, 0.1, "cholesky")
        for count in (1, 3, 5, 10, 20, 40):
            found = weighting(keys(noise), 1.0, 0.1, "cg", iterations=count)
            off = (found.weights - exact.weights).abs().max()
            gate = (found.weights.sigmoid() - exact.weights.sigmoid()).abs().max()
            row(
                noise,
                count,
                found.residual,
                float((found.magnitude / exact.magnitude - 1).abs()),
                float(off),
                float(gate),
            )


def ranks() -> None:
    print("\n## rank of lowrank, eps = 0.1\n")
    row("noise", "rank", "estimated residual", "error of the magnitude", "largest error of a weight")
    row(*["---"] * 5)
    for noise in (0.3, 0.003):
        exact = weighting(keys(noise), 1.0, 0.1, "cholesky")
        for rank in (8, 16, 32, 128):
            found = weighting(keys(noise), 1.0, 0.1, "lowrank", rank=rank, throw=False)
            off = (found.weights - exact.weights).abs().max()
            row(noise, rank, found.residual, float((found.magnitude / exact.magnitude - 1).abs()), float(off))


def units() -> None:
    print("\n## what orthogonal keys of unit variance count as\n")
    row("t", "similarity", "3 keys, eps = 0.1", "3 keys, eps = 1e-3", "1000 keys, eps = 1e-3")
    row(*["---"] * 5)
    axes = 1000**0.5 * torch.eye(1000, dtype=torch.float64)  # as long as standard normal keys: |k|^2 = d
    for t in (1.0, 2.0, 4.0, 8.0):
        counts = [
            float(weighting(axes[:n], t, eps, "cholesky").magnitude)
            for n, eps in ((3, 0.1), (3, 1e-3), (1000, 1e-3))
        ]
        row(t, math.exp(-2 * t), *counts)


def shares() -> None:
    print("\n## 20 against 50 x 1: the share of the unique key\n")
    row("gate", "where", "weight of the unique key", "its share of the sum")
    row(*["---"] * 4)
    k = torch.zeros(1, 1, 51, 2, dtype=torch.float64)
    k[..., 50, 0] = 1
    q = torch.tensor([math.log(20) * 2**0.5, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    geometry = torch.zeros_like(k)
    geometry[..., 50, :] = 30
    row("none (softmax)", "", *[float(unsoft.attention(q, k, k, return_weights=True)[1][..., 50])] * 2)
    for beta, gamma in ((1.0, 0.0), (4.0, -2.0), (12.0, -8.0)):
        for where in ("values", "mass"):
            layer = unsoft.mechanism(
                "magnitude", heads=1, head_dim=2, where=where, solver="cholesky"
            ).double()
            with torch.no_grad():
                layer.beta.fill_(beta)
                layer.gamma.fill_(gamma)
                w = layer(q, k, k, geometry_keys=geometry, return_weights=True)[1]
            row(f"sigmoid({beta:g} w {gamma:+g})", where, float(w[..., 50]), float(w[..., 50] / w.sum()))


if __name__ == "__main__":
    for part in (units, shares, ridge, steps, ranks):
        part()
