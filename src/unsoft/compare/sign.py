"""Does sign matter? Weight and gradient of one key as its logit moves, maps on the same queries and keys, opposed against irrelevant."""

from __future__ import annotations

from typing import Any

import torch

from unsoft import measure
from unsoft.compare.level import Level
from unsoft.compare.subject import WIDTH, Subject

LOGITS = tuple(round(-6 + 0.25 * k, 10) for k in range(49))
OTHERS = 15
TOKENS = 20


def curves(subject: Subject) -> list[dict[str, Any]]:
    """Weight of a key and |da/ds| of the row against the key's logit; fifteen others are N(0, 1)."""
    generator = torch.Generator().manual_seed(2)
    others = torch.randn(OTHERS, generator=generator, dtype=torch.float64)
    logits = torch.tensor(LOGITS, dtype=torch.float64)
    weigh = subject.row()
    with torch.no_grad():
        weights = weigh(torch.cat([logits[:, None], others.expand(len(logits), -1)], -1))[:, 0]
    slopes = measure.gradient(weigh, logits, others)
    return [
        {"logit": s, "weight": a, "gradient": key}
        for s, a, key in zip(LOGITS, weights.tolist(), slopes.key.tolist(), strict=True)
    ]


def heat_map(subject: Subject) -> list[list[float]]:
    """Causal weights on the same twenty tokens for every mechanism."""
    query, key = _tokens()
    with torch.no_grad():
        found = subject.weights(query, key, is_causal=True)[0]
    return [[round(x, 5) for x in row] for row in found.tolist()]


def sums(subject: Subject) -> list[dict[str, Any]]:
    """Sums of rows on random tokens: what is promised, what is free, what is negative."""
    generator = torch.Generator().manual_seed(4)
    query, key = (torch.randn(4, 128, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        found = subject.weights(query, key, is_causal=True)[:, 16:]
    total, size = found.sum(-1), found.abs().sum(-1)
    deletion = measure.deletion(found, torch.randn(4, 128, 8, generator=generator, dtype=torch.float64))
    return [
        {
            "sum_low": float(total.min()), "sum_high": float(total.max()), "l1_low": float(size.min()), "l1_high": float(size.max()),
            "negative": float(measure.negative_share(found).mean()), "deletion": float(deletion.share.mean()),
            "zeros": float((found[:, -1] == 0).double().mean()),
        }
    ]  # fmt: skip


def opposed(subject: Subject, level: Level) -> list[dict[str, Any]]:
    """The weight of an opposed key against that of an irrelevant one."""
    found = measure.discrimination(subject.row(), geometries=level.geometries, keys=32, dim=WIDTH)
    return [{"auc": found.auc, "gap": found.gap}]


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(1.5 * torch.randn(1, TOKENS, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]
