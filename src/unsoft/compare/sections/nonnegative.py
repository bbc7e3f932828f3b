"""The case for and against non-negative weights: gradients at negative
logits, and what signed weights are divided by.
"""

from __future__ import annotations

from typing import Any

import torch

from unsoft import measure
from unsoft.compare.jobs import Job, Results
from unsoft.compare.level import Level
from unsoft.compare.section import CLAIMS, SURVEY, Claim, Finding, Section, grade, job
from unsoft.formula import Formula
from unsoft.mechanisms.core.registry import resolve_formula


def facts(level: Level) -> list[Job]:
    return [
        job("negative logits", None, negative_logits, 0.1),
        job("sum normalised", None, sum_normalised, 0.1),
    ]


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
    """The largest |weight| of random rows: signed weights over their
    plain sum, against the sum of their sizes.
    """
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


def _vanishing_gradient(results: Results) -> Finding:
    rows = results.rows("negative logits")
    slope = {(row["mechanism"], row["logit"]): row["gradient"] for row in rows}
    lost = slope["softmax", -10.0] / slope["softmax", 0.0]
    rate = slope["softmax", -8.0] / slope["softmax", -10.0]
    cog = slope["cog", -4.0] / slope["softmax", -4.0]
    return grade(lost < 1e-3), (
        f"softmax's slope at logit -10 is {lost:.1g} of that at 0 and falls by {rate:.2f} for each 2 (e² ="
        " 7.39); "
        f"at -4 cog's is {cog:.0f} times as large"
    )


def _non_negativity(results: Results) -> Finding:
    rows = {row["kind"]: row["largest"] for row in results.rows("sum normalised")}
    plain, sizes = rows["signed, divided by the sum"], rows["signed, divided by the sum of sizes"]
    bounded = sizes <= 1
    return grade(not bounded, plain > 10), (
        f"signed weights over their plain sum, as cosFormer tried them, reach {plain:.0f}; over the sum of"
        " their sizes, as in cog, "
        f"at most {sizes:.2f}: {'the case is against that normaliser' if bounded else 'neither is bounded'};"
        " whether signs hurt a trained"
        " model is not run"
    )


SECTION = Section(
    name="nonnegative",
    order=35,
    facts=facts,
    claims=[
        Claim(
            "vanishing-gradient",
            SURVEY,
            "Softmax's gradient vanishes for strongly negative logits.",
            f"--only {CLAIMS}",
            _vanishing_gradient,
            evidence="sign",
        ),
        Claim(
            "non-negativity",
            SURVEY,
            "Weights should be non-negative: negative ones aggregate what is opposed and hurt (cosFormer).",
            f"--only {CLAIMS}",
            _non_negativity,
            evidence="sign",
        ),
    ],
)
