"""Differences of two attention maps, and the output gate, from their papers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsoft.testing.definitions.call import WrittenCall
from unsoft.testing.definitions.formulas import Pointwise, logits_of, visible_part


def gpam(call: WrittenCall, layer: Any, formula: Pointwise) -> Tensor:
    """(1 + l+) A(q) - l- A(relu(q) W-), or as written: plus l- A(relu(q W-)) (Heo and Choi 2024)."""
    plus, minus = (x[:, None, None] for x in (layer.plus, layer.minus))
    plus, minus = (
        (plus, -minus) if layer.literal else (layer.bound * plus.sigmoid(), layer.bound * minus.sigmoid())
    )
    mapped = (call.query @ layer.negative_map).relu(), call.query.relu() @ layer.negative_map
    negative = call.move(mapped[0] if layer.literal else mapped[1])
    first, second = (visible_part(formula(logits_of(call, q)), call.visible) for q in (call.query, negative))
    return (1 + plus) * first - minus * second


def differential(call: WrittenCall, layer: Any, formula: Pointwise) -> tuple[Tensor, Tensor]:
    """(A1 - l A2) v for each pair of heads, then RMSNorm and 1 - l0 (Ye et al. 2024): weights and output."""
    maps = []
    for which in (0, 1):
        half = call.change(
            query=call.query[:, which::2], key=call.key[:, which::2],
            visible=call.visible[:, which::2], bias=call.bias[:, which::2],
        )  # fmt: skip
        maps.append(visible_part(formula(logits_of(half)), half.visible))
    a1, b1, a2, b2 = layer.vectors
    strength = (a1 * b1).sum().exp() - (a2 * b2).sum().exp() + layer.first
    weights = maps[0] - strength * maps[1]
    joined = torch.cat([call.value[:, 0::2], call.value[:, 1::2]], dim=-1)
    out = weights @ joined.repeat_interleave(weights.shape[1] // joined.shape[1], dim=1)
    scale = (1 - layer.first) * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    first, second = (out * scale * layer.gain).chunk(2, dim=-1)
    return (weights * scale).repeat_interleave(2, dim=1), torch.stack([first, second], dim=2).flatten(1, 2)


def differential2(call: WrittenCall, layer: Any, formula: Pointwise) -> Tensor:
    """A(q_2h) - sigmoid(l_h) A(q_2h+1), with l linear in the first query (Ye et al. 2026)."""
    weights = visible_part(formula(logits_of(call)), call.visible)
    strength = (call.query[:, 0::2] @ layer.factor.weight + layer.factor.constant[:, None]).sigmoid()
    return weights[:, 0::2] - strength * weights[:, 1::2]


def gate(call: WrittenCall, layer: Any) -> Tensor:
    """The factor (B, heads, R, 1) of "gated": sigmoid(q W + c) (Qiu et al. 2025)."""
    query = call.query[:, :: call.query.shape[1] // layer.place.heads]
    return (query @ layer.factor.weight + layer.factor.constant[:, None]).sigmoid()
