"""Do tokens become the same? Random attention layers on top of one another, with and without a skip connection."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unsoft import measure
from unsoft.compare.level import Level
from unsoft.compare.subject import Subject

TOKENS, HEADS = 48, 4


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

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    width = HEADS * 16
    states = inputs = normal(TOKENS, width)
    found = [_measured(states, inputs)]
    for layer in range(depth):
        projections = normal(3, width, width) / math.sqrt(width)
        q, k, v = (states @ w for w in projections)
        mixed = _attend(subject, q, k, v, layer) @ (normal(width, width) / math.sqrt(width))
        states = states + mixed if skip else mixed
        # Only the scale of the whole is set right, so that neither 0 nor infinity is reached; differences between tokens stay.
        states = states / states.square().mean().sqrt().clamp(min=1e-30)
        found.append(_measured(states, inputs))
    return found


def _attend(subject: Subject, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Several heads, each with its own weights of the mechanism."""
    heads = []
    for query, key, value in zip(q.split(16, -1), k.split(16, -1), v.split(16, -1), strict=True):
        with torch.no_grad():
            weights = subject.weights(query[None], key[None], is_causal=True)[0]
        heads.append(weights @ value)
    return torch.cat(heads, -1)


def _measured(states: Tensor, inputs: Tensor) -> tuple[float, float, float]:
    residual = measure.residual(states) / states.norm().clamp(min=1e-30)
    return float(residual), float(measure.mean_cosine(states)), float(measure.recovery(states, inputs))


