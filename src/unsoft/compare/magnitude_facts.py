"""Measurements behind the claims on magnitude: clones, isolation, additivity, bound, stability, units, price."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from unsoft.bench.timing import interleaved
from unsoft.compare.hijack import measured_share
from unsoft.compare.level import Level
from unsoft.compare.subject import Subject
from unsoft.errors import SolverError
from unsoft.formula import Formula
from unsoft.magnitude import weighting
from unsoft.magnitude.truncated import truncated_weights

WIDTH = 64


def sets() -> list[dict[str, Any]]:
    """Magnitude weights of sets whose answer is known."""
    generator = torch.Generator().manual_seed(11)

    def cloud(count: int, size: float = 1.0) -> torch.Tensor:
        return size * torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)

    eps, rows = 1e-9, []
    for count in (2, 10, 50):
        clones = cloud(1).expand(count, WIDTH)
        found = weighting(clones, eps=eps, solver="cholesky", throw=False)
        rows.append({"set": "clones", "count": count, "expected": 1 / count, "found": float(found.weights.mean()),
                     "spread": float(found.weights.max() - found.weights.min())})  # fmt: skip
    lonely = torch.cat([cloud(20, 0.1), cloud(1) + 40])
    rows.append(
        {
            "set": "isolated",
            "count": 21,
            "expected": 1.0,
            "found": float(weighting(lonely, eps=eps).weights[-1]),
        }
    )
    first, second = cloud(30, 0.5), cloud(40, 0.5) + 60
    parts = [float(weighting(x, eps=eps).magnitude) for x in (first, second)]
    whole = float(weighting(torch.cat([first, second]), eps=eps).magnitude)
    rows.append({"set": "far apart", "count": 70, "expected": sum(parts), "found": whole})
    largest = max(
        float(weighting(cloud(64, size), eps=eps).magnitude) / 64
        for size in (0.1, 0.3, 1.0, 3.0, 10.0)
        for _ in range(4)
    )
    rows.append({"set": "bound", "count": 64, "expected": 1.0, "found": largest})
    return rows


def stability() -> list[dict[str, Any]]:
    """Nearly equal keys in float32: what the exact solver says, and how far weights move if keys move by 1e-6."""
    generator = torch.Generator().manual_seed(12)
    keys = torch.randn(1, WIDTH, generator=generator) + 1e-3 * torch.randn(64, WIDTH, generator=generator)
    moved = keys + 1e-6 * torch.randn(64, WIDTH, generator=generator)
    rows = []
    for eps in (0.0, 1e-6, 1e-4, 1e-2, 1e-1):
        try:
            found, other = (weighting(x, eps=eps, solver="cholesky", throw=False) for x in (keys, moved))
        except SolverError as problem:
            rows.append(
                {
                    "eps": eps,
                    "status": str(problem).splitlines()[0],
                    "change": None,
                    "largest": None,
                    "total": None,
                }
            )
            continue
        change = float((found.weights - other.weights).norm() / found.weights.norm())
        rows.append(
            {"eps": eps, "status": found.status.name.lower(), "change": change if math.isfinite(change) else None,
             "largest": float(found.weights.abs().max().nan_to_num()), "total": float(found.magnitude.nan_to_num())}
        )  # fmt: skip
    return rows


def units() -> list[dict[str, Any]]:
    """What 50 clones contribute to the output, in units of one of them: gate passed on as it is, and through the sigmoid."""
    clones = torch.zeros(50, WIDTH, dtype=torch.float64)
    weights = weighting(
        torch.cat([clones, clones[:1] + 40]), eps=1e-9, solver="cholesky", throw=False
    ).weights[:50]
    rows = [{"gate": "weight", "slope": None, "offset": None, "units": float(weights.sum())}]
    for slope, offset in ((1.0, 0.0), (4.0, -2.0), (10.0, -5.0)):
        gates = torch.sigmoid(slope * weights + offset)
        alone = torch.sigmoid(torch.tensor(slope + offset, dtype=torch.float64))
        rows.append(
            {"gate": "sigmoid", "slope": slope, "offset": offset, "units": float(gates.sum() / alone)}
        )
    return rows


def example() -> list[dict[str, Any]]:
    """Document 002's example on real attention weights: relevance 20 against 50 keys of relevance 1."""
    softmax = Subject("softmax", "softmax")
    rows = [
        {
            "mechanism": "softmax",
            "clones": 50,
            "share": measured_share(softmax, 50, unique=math.log(20), clone=0.0),
        }
    ]
    plain = Formula("exp(s - m)", "exp(s - m)", "s")
    rows.append(
        {"mechanism": "exp by its formula", "clones": 50,
         "share": float(plain.row(torch.tensor([math.log(20)] + [0.0] * 50, dtype=torch.float64))[0])}
    )  # fmt: skip
    return rows


def price(level: Level) -> list[dict[str, Any]]:
    """Seconds of five CG steps on all keys against a forward pass of SDPA, four heads: does the ratio grow with N?"""
    rows = []
    for length in level.lengths:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 4, length, WIDTH, generator=generator) for _ in range(3))
        points, ones = k[0] / math.sqrt(WIDTH), torch.ones(4, length)

        def attention(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            return scaled_dot_product_attention(q, k, v)

        def solve(points: torch.Tensor = points, ones: torch.Tensor = ones) -> object:
            return truncated_weights(points, None, ones, 0.1, 5, check=False)

        with torch.no_grad():
            taken = interleaved({"attention": attention, "solve": solve}, rounds=max(level.rounds, 5))
        seconds = {name: min(samples) for name, samples in taken.items()}
        rows.append({"length": length, **seconds, "ratio": seconds["solve"] / seconds["attention"]})
    return rows
