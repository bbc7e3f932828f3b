"""dynamic-alibi: softmax whose logits fall with the distance, by a slope that every query chooses.

    a_ij = softmax_j( s_ij - t_i |i - j| )          t_i = exp(x_i w + b)

ALiBi (Press et al., Train Short, Test Long, arXiv 2108.12409) with the slope made a function of the data; at
the start w = 0 and b gives ALiBi's own slopes 2^(-8 h / H). In ``fox`` the tokens in between decide how much
is forgotten, here the token that looks back does.

Strengths: each query chooses how far it looks; no other positions are needed.
Limitations: it cannot subtract, attend to nothing, or prefer a far key to a near one of the same content.
Slopes are positive; distances count both ways, so it works without causality too.

The slope comes from the hidden state if ``hidden=`` brings it, otherwise from the query.

>>> import torch
>>> from unsoft.modules.build import mechanism
>>> layer = mechanism("dynamic-alibi", heads=8, head_dim=4)
>>> k = torch.randn(1, 8, 3, 4)
>>> _, weights = layer(torch.zeros(1, 8, 3, 4), k, k, is_causal=True, return_weights=True)
>>> weights[0, 0, 2].log().diff()                                              # the first head's slope is 1/2
tensor([0.5000, 0.5000], grad_fn=<SubBackward0>)
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from unsoft.engines.call import compute_dtype
from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Layer, WrittenCall, shares
from unsoft.modules.module import TokenFactor, Values
from unsoft.modules.pointwise import FieldSource, Tokens, field_family
from unsoft.modules.spec import LayerSpec

DYNAMIC_ALIBI = Formula(
    weight="exp(s - t_i*abs(i - j) - m)",
    mass="exp(s - t_i*abs(i - j) - m)",
    peak="s - t_i*abs(i - j)",
    fields={"t": "query"},
    name="dynamic-alibi",
    paper="after Press et al. 2022, arXiv 2108.12409",
    summary="softmax that fades with distance, as fast as the query says",
    facts=Facts(signed=False),
)
_FLAT = -12.0
"""Logarithm of the slope of ``open_start``."""


class Slope(FieldSource):
    """t: how much a query's logits fall with every step of distance."""

    uses_hidden = True

    def __init__(self, layer_spec: LayerSpec) -> None:
        super().__init__(layer_spec)
        self.factor = TokenFactor(layer_spec, width=1)
        heads = layer_spec.heads
        with torch.no_grad():
            self.factor.constant.copy_(-8 * math.log(2) / heads * torch.arange(1, heads + 1)[:, None])

    def forward(self, tokens: Tokens) -> Mapping[str, Values]:
        wide = compute_dtype(tokens.query.dtype)
        hidden = None if tokens.hidden is None else tokens.hidden.to(wide)
        return {"t": self.factor(tokens.query.to(wide), hidden)[..., 0].exp()}

    @torch.no_grad()
    def open_start(self) -> None:
        """Set a slope of 6e-6: a token 8,192 steps away loses 5 %."""
        self.factor.constant.fill_(_FLAT)


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """softmax(s - t |i - j|) with t = exp(q w + b)."""
    factor = layer.source.factor
    slope = (call.query @ factor.weight + factor.constant[:, None]).exp()
    return shares(call.logits - slope * (call.rows[:, None] - call.keys).abs() + call.bias, call.visible)


field_family("dynamic-alibi", DYNAMIC_ALIBI, fields_from=Slope)
