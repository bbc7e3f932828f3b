"""Is it rank that linear attention lacks?

Norms, ranks, dimensions, independent features and decay: only claims, no figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from unsoft import measure, theory
from unsoft.compare.jobs import Job, Results
from unsoft.compare.level import Level
from unsoft.compare.section import CLAIMS, SU, Claim, Finding, Section, grade, job
from unsoft.compare.sections.focus import measured_sparsity
from unsoft.compare.subject import Subject

WIDTHS = (2, 4, 8, 16, 32, 64, 128, 256)


def facts(level: Level) -> list[Job]:
    keys = level.keys
    return [
        job("norm ratios", None, norm_ratios, 0.3),
        job("causal ranks", None, causal_ranks, 0.1),
        job("dimensions", None, partial(dimensions, keys), 1.5, {"keys": keys}),
        job("features", None, features, 0.5),
        job("decay", None, decay, 0.1),
    ]


def norm_ratios() -> list[dict[str, Any]]:
    """The largest |q|_2 / |q|_1 found in each dimension, by ascent from
    random non-negative queries and at one-hot ones.
    """
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
        {
            "mechanism": name,
            "width": width,
            "S": float(measured_sparsity(Subject(name, name), 0.0, 1.0, keys, 24, width).mean()),
        }
        for name in ("linear-relu", "linear-elu1", "linear-exp")
        for width in WIDTHS[1:]
    ]


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
                {
                    "decay": rate,
                    "length": length,
                    "measured": float(measure.sparsity(row)),
                    "theory": float(theory.decay_sparsity(length, min(rate, 1.0))),
                }
            )
    return rows


def _closed_form(kind: str) -> Callable[[Results], Finding]:
    def check(results: Results) -> Finding:
        rows = [row for row in results.rows("features") if row["kind"] == kind]
        error = max(abs(row["measured"] - row["theory"]) for row in rows)
        return grade(
            error < 2e-3
        ), f"largest distance over {len(rows)} widths and 200,000 keys each: {error:.1g}"

    return check


def _decay(results: Results) -> Finding:
    rows = results.rows("decay")
    error = max(abs(row["measured"] - row["theory"]) for row in rows)
    fast = [row["measured"] for row in rows if row["decay"] < 0.95]
    return grade(error < 1e-6 and fast[-1] < fast[0] / 3), (
        f"largest distance {error:.1g}; with decay 0.9 S goes from {fast[0]:.3f} to {fast[-1]:.3f} as rows"
        " get longer"
    )


def _norms(results: Results) -> Finding:
    rows = results.rows("norm ratios")
    largest = max(row["largest"] for row in rows)
    last = rows[-1]
    return grade(all(abs(row["largest"] - row["sqrt"]) < 0.1 * row["sqrt"] for row in rows)), (
        f"the largest found is {largest:.4f} in every dimension up to {last['width']}, where √d ="
        f" {last['sqrt']:.0f}; "
        "it lies between 1/√d and 1"
    )


def _rank(results: Results) -> Finding:
    rows = results.rows("causal ranks")
    causal = [row for row in rows if row["causal"]]
    full = [row["mechanism"] for row in causal if row["rank"] == row["length"]]
    lost = [f"{row['mechanism']} {row['rank']}" for row in causal if row["rank"] < row["length"]]
    low = max(row["rank"] for row in rows if not row["causal"])
    zeros = [row["mechanism"] for row in causal if row["zero_diagonal"]]
    why = (
        f"zeros on the diagonal: {', '.join(zeros)}"
        if zeros
        else "tiny entries on the diagonal are no rank in double precision"
    )
    return grade(not lost, bool(full)), (
        f"of {causal[0]['length']}: full for {', '.join(full) or 'none'}; {', '.join(lost) or 'none'} lost"
        f" some ({why}); "
        f"without the mask at most {low}"
        if lost
        else f"full, {causal[0]['length']}, for {', '.join(full)}; without the mask at most {low}"
    )


def _dimensions(results: Results) -> Finding:
    rows = results.rows("dimensions")
    verdicts, parts = [], []
    for name in dict.fromkeys(row["mechanism"] for row in rows):
        own = [row for row in rows if row["mechanism"] == name]
        verdicts.append(own[-1]["S"] < own[0]["S"] - 0.01)
        parts.append(f"{name} {own[0]['S']:.2f} → {own[-1]['S']:.2f}")
    widths = sorted({row["width"] for row in rows})
    return grade(all(verdicts), any(verdicts)), (
        f"S from {widths[0]} to {widths[-1]} dimensions: {', '.join(parts)}: flatter, not sparser"
        if not any(verdicts)
        else f"S from {widths[0]} to {widths[-1]} dimensions: {', '.join(parts)}"
    )


def _claim(name: str, text: str, check: Callable[[Results], Finding]) -> Claim:
    return Claim(name, SU, text, f"--only {CLAIMS}", check)


SECTION = Section(
    name="linear",
    order=70,
    facts=facts,
    claims=[
        _claim(
            "general-linear",
            "S of linear attention with non-negative features, from mean and covariance.",
            _closed_form("general"),
        ),
        _claim("iid-linear", "The same with independent features.", _closed_form("independent")),
        _claim("norm-ratio", "‖q‖₂/‖q‖₁ has the maximum √d.", _norms),
        _claim("dimensions", "More dimensions make linear attention sparser.", _dimensions),
        _claim(
            "causal-rank",
            "Causal linear attention has full rank, so low rank does not explain its weakness.",
            _rank,
        ),
        _claim("decay", "The closed form of S for decay; it tends to 0 as rows get longer.", _decay),
    ],
)
