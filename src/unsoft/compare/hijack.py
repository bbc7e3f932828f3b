"""Is it hijacked? What a unique key keeps as clones of another become more."""

from __future__ import annotations

import math
from typing import Any

import torch

from unsoft import theory
from unsoft.compare.subject import WIDTH, Subject

CLONES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
UNIQUE, CLONE = 1 + math.log(20), 1.0
"""Logits: exp says that the unique key is 20 times as relevant. Logit 0 would be nothing to many signed mechanisms."""
FAR = 40.0


def hijack(subject: Subject) -> list[dict[str, Any]]:
    rows = [
        {"kind": "measured", "clones": count, "share": measured_share(subject, count)} for count in CLONES
    ]
    return rows + [
        {"kind": "theory", "clones": count, "share": share}
        for count, share in zip(CLONES, _theory(subject), strict=False)
    ]


def measured_share(subject: Subject, clones: int, **options: float) -> float:
    """|a_unique| / sum |a| of a row over one key and ``clones`` equal ones, far away from it."""
    unique, clone = options.get("unique", UNIQUE), options.get("clone", CLONE)
    width = WIDTH
    query = torch.zeros(1, 1, width, dtype=torch.float64)
    query[..., 0] = math.sqrt(width)
    key = torch.zeros(1, clones + 1, width, dtype=torch.float64)
    key[:, :, 0] = clone
    key[:, 0, 0] = unique
    key[:, :, 1] = FAR
    key[:, 0, 1] = -FAR
    with torch.no_grad():
        row = subject.weights(query, key)[0, 0].abs()
    total = float(row.sum())
    return float(row[0]) / total if total else 0.0


def _theory(subject: Subject) -> list[float]:
    if subject.mechanism == "magnitude":
        return theory.magnitude_hijack(CLONES, unique=UNIQUE, clone=CLONE, eps=0.1).share.tolist()
    if subject.mechanism == "magnitude+cog":
        return theory.magnitude_hijack(CLONES, unique=UNIQUE, clone=CLONE, eps=0.1, base="cog").share.tolist()
    if subject.formula is None or subject.formula.uses & {"i", "j"}:
        return []
    try:
        return theory.hijack_share(subject.formula, CLONES, unique=UNIQUE, clone=CLONE).tolist()
    except ValueError:
        return []
