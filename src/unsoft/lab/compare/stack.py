"""Random attention layers on top of one another: what is left of the tokens after each.

Queries and keys come from one random map, so that each token is its own best match, as it is in trained
models: without that no mechanism has a reason to look at the token itself, and all forget it in the first
layer. Without skip connections values are the states themselves and nothing but the mixing is seen. With
them values and outputs have random maps, and what a layer adds to a token has the same length for every
mechanism.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from unsoft import measure
from unsoft.measure.rows import unit_rows

SEQUENCES, TRAIN, TOKENS, HEADS, HEAD = 16, 12, 48, 4, 16
WIDTH = HEADS * HEAD


class Weighs(Protocol):
    """What has weights: a mechanism, or a control."""

    def weights(self, query: Tensor, key: Tensor, *, is_causal: bool = False) -> Tensor:
        """(batch, queries, keys)."""


class Noise:
    """The control of every measure of states: weights that know nothing of queries and keys."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def weights(self, query: Tensor, key: Tensor, *, is_causal: bool = False) -> Tensor:
        found = torch.randn(len(query), query.shape[1], key.shape[1], generator=self._generator)
        return found.tril() if is_causal else found


def stack(subject: Weighs, depth: int, skip: bool, seed: int) -> list[dict[str, Any]]:
    """Measures of the states before the first layer and after each."""
    generator = torch.Generator().manual_seed(100 + seed)
    states = inputs = torch.randn(SEQUENCES, TOKENS, WIDTH, generator=generator)
    length = math.sqrt(2 / depth)  # so that noise leaves (1 + 2/depth)^-depth, about e^-2, whatever the depth
    rows = [measured(states, inputs)]
    for _ in range(depth):
        maps = torch.randn(3, WIDTH, WIDTH, generator=generator) / math.sqrt(WIDTH)
        matched = _heads(states @ maps[0])
        value = _heads(states @ maps[1] if skip else states)
        with torch.no_grad():
            weights = subject.weights(matched, matched, is_causal=True).to(states.dtype)
        out = (weights @ value).view(SEQUENCES, HEADS, TOKENS, HEAD).transpose(1, 2).flatten(2)
        if skip:
            out = states + length * states.norm(dim=-1, keepdim=True) * unit_rows(out @ maps[2])
        # Only the scale of the whole is set right, so that neither 0 nor infinity is reached.
        states = out / out.square().mean().sqrt().clamp(min=1e-30)
        rows.append(measured(states, inputs) | {"alike": float(heads_alike(weights))})
    return rows


def _heads(x: Tensor) -> Tensor:
    """(sequences * heads, tokens, head)."""
    return x.view(*x.shape[:-1], HEADS, HEAD).transpose(1, 2).flatten(0, 1)


def heads_alike(weights: Tensor) -> Tensor:
    """Mean cosine between the patterns of different heads."""
    similar: Tensor = measure.head_similarity(weights.view(SEQUENCES, HEADS, *weights.shape[1:]))
    others = similar.sum((-2, -1)) - similar.diagonal(dim1=-2, dim2=-1).sum(-1)
    return others.mean() / (HEADS * (HEADS - 1))


def measured(states: Tensor, inputs: Tensor, train: int = TRAIN) -> dict[str, Any]:
    """Residual over norm, effective rank over that of the inputs, tokens that can be told by their input,
    what of the input can be decoded, and how far differences between tokens have moved from those of the
    inputs. Maps are fitted to the first ``train`` sequences.
    """
    late = states[train:], inputs[train:]  # some sequences are enough for what each has by itself
    ranks = [float(measure.effective_rank(unit_rows(x)).mean()) for x in late]
    return {
        "residual": float(
            (measure.residual(states) / states.flatten(1).norm(dim=-1).clamp(min=1e-30)).mean()
        ),
        "rank": ranks[0] / ranks[1],
        "recovery": float(measure.recovery(*late).mean()),
        "decoded": float(measure.decodability(states, inputs, train)),
        "moved": moved(states, inputs),
    }


def moved(states: Tensor, inputs: Tensor) -> float:
    """1 - squared cosine between differences of tokens and those of the inputs."""
    left, first = (x - x.mean(-2, keepdim=True) for x in (states, inputs))
    sizes = float(left.square().sum() * first.square().sum())
    return 1 - float((left * first).sum()) ** 2 / sizes if sizes > 0 else 1.0
