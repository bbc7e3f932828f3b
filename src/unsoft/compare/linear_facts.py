"""Measurements behind the claims on linear attention: norms, ranks, dimensions, independent features, decay."""

from __future__ import annotations

import math
from typing import Any

import torch

from unsoft import measure, theory
from unsoft.compare.focus import measured_sparsity
from unsoft.compare.subject import Subject

WIDTHS = (2, 4, 8, 16, 32, 64, 128, 256)


def norm_ratios() -> list[dict[str, Any]]:
    """The largest |q|_2 / |q|_1 found in each dimension, by ascent from random non-negative queries and at one-hot ones."""
    rows = []
    generator = torch.Generator().manual_seed(6)
    for width in WIDTHS:
        q = torch.rand(64, width, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(200):
            (slope,) = torch.autograd.grad((q.norm(dim=-1) / q.abs().sum(-1)).sum(), q)
            with torch.no_grad():
                q += 0.5 * q.norm(dim=-1, keepdim=True) * slope
                q.clamp_(min=0)
        climbed = float((q.norm(dim=-1) / q.abs().sum(-1)).max().detach())
        one_hot = torch.eye(width, dtype=torch.float64)[0]
        rows.append(
            {
                "width": width,
                "largest": max(climbed, float(one_hot.norm() / one_hot.abs().sum())),
                "sqrt": math.sqrt(width),
            }
        )
    return rows


def causal_ranks() -> list[dict[str, Any]]:
    """Numeric ranks of the attention weights of linear mechanisms with 16 features on 96 tokens."""
    generator = torch.Generator().manual_seed(8)
    query, key = (torch.randn(1, 96, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    rows = []
    for name in ("linear-identity", "linear-elu1", "linear-exp", "linear-relu"):
        subject = Subject(name, name)
        for is_causal in (False, True):
            weights = subject.weights(query, key, is_causal=is_causal)[0]
            rank = int(torch.linalg.matrix_rank(weights, rtol=1e-12))
            zeros = int((weights.diagonal() == 0).sum())
            rows.append(
                {
                    "mechanism": name,
                    "causal": is_causal,
                    "length": 96,
                    "features": 16,
                    "rank": rank,
                    "zero_diagonal": zeros,
                }
            )
    return rows


def dimensions(keys: int) -> list[dict[str, Any]]:
    """S of linear attention at gamma = 1 as queries and keys get more dimensions."""
    return [
        {"mechanism": name, "width": width, "S": float(measured_sparsity(Subject(name, name), 0.0, 1.0, keys, 24, width).mean())}
        for name in ("linear-relu", "linear-elu1", "linear-exp")
        for width in WIDTHS[1:]
    ]  # fmt: skip


def features() -> list[dict[str, Any]]:
    """Weights q . k of 200,000 non-negative keys against the general and the independent closed form."""
    generator = torch.Generator().manual_seed(9)
    rows = []
    for width in (4, 16, 64):
        q = torch.rand(width, generator=generator, dtype=torch.float64)
        independent = torch.rand(200_000, width, generator=generator, dtype=torch.float64).square()
        mixing = torch.rand(width, width, generator=generator, dtype=torch.float64)
        mixed = independent @ mixing
        found = float(measure.sparsity(mixed @ q))
        predicted = float(theory.linear_sparsity(q, mixed.mean(0), torch.cov(mixed.T)))
        rows.append({"kind": "general", "width": width, "measured": found, "theory": predicted})
        found = float(measure.sparsity(independent @ q))
        # u^2 of a uniform u has mean 1/3 and variance 4/45
        predicted = float(theory.iid_linear_sparsity(q, 1 / 3, math.sqrt(4 / 45)))
        rows.append({"kind": "independent", "width": width, "measured": found, "theory": predicted})
    return rows


def decay() -> list[dict[str, Any]]:
    """S of the last row of the mechanism decay against its closed form."""
    rows = []
    for start in (0.9, 0.99):
        subject = Subject("decay", f"decay({start})")
        for length in (16, 64, 256, 1024):
            zero = torch.zeros(1, length, 16, dtype=torch.float64)
            row = subject.weights(zero[:, :1], zero)[0, 0]
            rate = float(row[-2] / row[-1])
            rows.append(
                {"decay": rate, "length": length, "measured": float(measure.sparsity(row)),
                 "theory": float(theory.decay_sparsity(length, min(rate, 1.0)))}
            )  # fmt: skip
    return rows
