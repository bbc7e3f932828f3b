"""deltanet: linear attention that corrects the value its state holds for a key, instead of adding to it.

    S_t = S_(t-1) + b_t k_t (v_t - S_(t-1)^T k_t)^T          o_t = S_t^T q_t          |k_t| = |q_t| = 1

Papers: Schlag et al., Linear Transformers Are Secretly Fast Weight Programmers, arXiv 2102.11174; Yang et
al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length, arXiv 2406.06484 (NeurIPS
2024).

Strengths: it replaces the value of a key that comes again (b = 1 overwrites it, b = 0 ignores the token) at a
cost per token that does not grow; the cache is the state.
Limitations: it holds at most as many exact pairs as keys have channels, drops old content only by overwriting
it (see gated-deltanet), and looks back only.

b_t = sigmoid(x_t W + c), x the hidden state if ``hidden=`` brings it, otherwise the key; it starts at 1/2.
The papers' blocks have short convolutions, silu and a norm around it; this is the map itself.

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> layer = DeltaNet(LayerSpec(1, 2), start=20.0)  # b = 1: the second value replaces the first
>>> k, v = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]]), torch.tensor([[[[3.0], [5.0]]]])
>>> layer(k, k, v, is_causal=True).flatten().round().tolist()
[3.0, 5.0]
"""

import torch
from torch import Tensor

from unsoft.formula import Properties
from unsoft.modules.definition import Layer, NotDefined, WrittenCall
from unsoft.modules.delta import EPS, Delta
from unsoft.modules.module import TokenFactor
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec

_AFFORDABLE = 1 << 24
"""Limit on the numbers in all states of the recurrence together, which gradients need."""


class DeltaNet(Delta):
    """See the module's docstring. ``start``: b begins at sigmoid(start)."""

    def __init__(self, layer_spec: LayerSpec, *, start: float = 0.0) -> None:
        super().__init__(layer_spec)
        self.correction = TokenFactor(layer_spec, width=1, start=start)

    def gates(self, key: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.correction(key, hidden)[..., 0].sigmoid(), None


def from_keys(call: WrittenCall, factor: TokenFactor) -> Tensor:
    """Return x W + c of a token factor, for every key (B, H, S, width)."""
    return call.spread(call.key) @ factor.weight + factor.constant[:, None]


def recurrence(call: WrittenCall, correct: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and output of the delta rule, token by token; ``kept`` (B, H, S, 1 or D) multiplies the
    state."""
    whole = call.visible.any(-1, keepdim=True) & (call.keys <= call.rows[:, None]) & call.there[:, :, None]
    if not call.causal or bool((whole != call.visible).any()):
        raise NotDefined("the delta rule knows masks of whole keys only, and looks back")
    key, value = call.spread(call.key), call.spread(call.value)
    batch, heads, count, width = key.shape
    if batch * heads * count * width * (value.shape[3] + count) > _AFFORDABLE:
        raise NotDefined("its states, all of which gradients need, would not fit into memory")
    query, key = (x / (x.square().sum(-1, keepdim=True) + EPS).sqrt() for x in (call.query, key))
    identity = torch.eye(count, dtype=key.dtype).expand(batch, heads, -1, -1)
    values = torch.cat([value, identity], dim=-1)  # what comes out of the second part are the weights
    state = key.new_zeros(batch, heads, width, values.shape[3])
    outs = {}
    # Taken apart once: the gradient of each x[:, :, t] would be a tensor of the whole size.
    tokens = zip(
        *(x.unbind(2) for x in (key[..., None], values, correct[..., None], kept[..., None])), strict=True
    )
    for t, (k, v, rate, keep) in enumerate(tokens):
        old = state * keep
        wrong = v - (old * k).sum(2)
        new = old + k * (rate * wrong)[:, :, None]
        state = torch.where(call.there[:, :, t, None, None], new, state)
        for row in (call.rows == t).nonzero().flatten().tolist() + (
            (call.rows >= count).nonzero().flatten().tolist() if t == count - 1 else []
        ):
            outs[row] = (query[:, :, row, :, None] * state).sum(2)
    nothing = values.new_zeros(batch, heads, values.shape[3])
    rows = torch.stack([outs.get(row, nothing) for row in range(len(call.rows))], dim=2)
    rows = torch.where(call.visible.any(-1, keepdim=True), rows, 0.0)
    return rows[..., value.shape[3] :], rows[..., : value.shape[3]]


def definition(call: WrittenCall, layer: Layer) -> tuple[Tensor, Tensor]:
    """The recurrence of the paper (Schlag et al. 2021, with keys of length 1 as Yang et al. 2024)."""
    correct = from_keys(call, layer.correction)[..., 0].sigmoid()
    return recurrence(call, correct, torch.ones_like(correct)[..., None])


family(
    "deltanet",
    DeltaNet,
    summary="linear attention that corrects what its state holds for a key",
    paper="Yang et al. 2024, arXiv 2406.06484",
    properties=Properties(signed=True),
)
