"""Do tokens become the same? Random attention layers on top of one another, with and without a skip connection.

Queries and keys are random projections of the states. With skip connections values are too, as in a network before training; without
them values are the states themselves: nothing but the mixing is seen, and a token can still be compared with what it was.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unsoft import measure
from unsoft.compare.level import Level
from unsoft.compare.subject import Subject

TOKENS, HEADS, HEAD = 48, 4, 16


def collapse(subject: Subject, level: Level) -> list[dict[str, Any]]:
    """Residual over norm, mean cosine and recovery after each layer, means over random networks."""
    rows = []
    for skip in (False, True):
        found = [_stack(subject, level.depth, skip, seed) for seed in range(level.seeds)]
        for depth, at_depth in enumerate(zip(*found, strict=True)):
            means = [sum(one[k] for one in at_depth) / len(at_depth) for k in range(3)]
            rows.append(
                {"skip": skip, "depth": depth, "residual": means[0], "cosine": means[1], "recovery": means[2]}
            )
    return rows


def _stack(subject: Subject, depth: int, skip: bool, seed: int) -> list[tuple[float, float, float]]:
    generator = torch.Generator().manual_seed(100 + seed)
    states = inputs = torch.randn(TOKENS, HEADS * HEAD, generator=generator)
    found = [_measured(states, inputs)]
    for _ in range(depth):
        projections = torch.randn(4, HEADS * HEAD, HEADS * HEAD, generator=generator) / math.sqrt(
            HEADS * HEAD
        )
        q, k, v = (states @ w for w in projections[:3])
        states = (
            states + _attend(subject, q, k, v) @ projections[3] if skip else _attend(subject, q, k, states)
        )
        # Only the scale of the whole is set right, so that neither 0 nor infinity is reached; differences between tokens stay.
        states = states / states.square().mean().sqrt().clamp(min=1e-30)
        found.append(_measured(states, inputs))
    return found


def _attend(subject: Subject, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All heads at once; each is a batch entry with its own queries and keys."""
    query, key, value = (x.unflatten(-1, (HEADS, HEAD)).transpose(0, 1) for x in (q, k, v))
    with torch.no_grad():
        weights = subject.weights(query, key, is_causal=True)
    return (weights @ value).transpose(0, 1).flatten(1)


def _measured(states: Tensor, inputs: Tensor) -> tuple[float, float, float]:
    residual = measure.residual(states) / states.norm().clamp(min=1e-30)
    return float(residual), float(measure.mean_cosine(states)), float(measure.recovery(states, inputs))
