"""Measurements behind the claims on gradients and on non-negative weights."""

from __future__ import annotations

from typing import Any

import torch

from unsoft import measure
from unsoft.formula import Formula
from unsoft.mechanisms.core.registry import resolve_formula


def negative_logits() -> list[dict[str, Any]]:
    """|da/ds| of a key at falling logits among fifteen others of logit 0, under softmax and under cog."""
    logits = torch.tensor([0.0, -2.0, -4.0, -6.0, -8.0, -10.0], dtype=torch.float64)
    others = torch.zeros(15, dtype=torch.float64)
    others[::2] = 0.5
    rows = []
    for name in ("softmax", "cog", "relu"):
        found = measure.gradient(resolve_formula(name), logits, others).key
        rows += [
            {"mechanism": name, "logit": s, "gradient": g}
            for s, g in zip(logits.tolist(), found.tolist(), strict=True)
        ]
    return rows


def sum_normalised() -> list[dict[str, Any]]:
    """The largest |weight| of random rows: signed weights over their plain sum, against the sum of their sizes."""
    generator = torch.Generator().manual_seed(13)
    logits = torch.randn(2000, 64, generator=generator, dtype=torch.float64)
    kinds = {
        "signed, divided by the sum": logits / logits.sum(-1, keepdim=True),
        "signed, divided by the sum of sizes": logits / logits.abs().sum(-1, keepdim=True),
        "rectified, divided by the sum": logits.relu() / logits.relu().sum(-1, keepdim=True),
        "cog": Formula("sign(s)*exp(abs(s) - m)", "exp(abs(s) - m)", "abs(s)").row(logits),
    }
    return [
        {"kind": kind, "largest": float(a.abs().max()), "mean_size": float(a.abs().sum(-1).mean())}
        for kind, a in kinds.items()
    ]
