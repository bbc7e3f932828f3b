"""rbf: softmax over distances: keys that are long get no advantage over keys that are near.

    a_ij = softmax_j( -scale |q_i - k_j|^2 ) = softmax_j( 2 s_ij - scale |k_j|^2 )

The radial basis function as a kernel of attention: Tsai et al., Transformer Dissection, arXiv 1908.11775. The
part |q_i|^2 is the same for all keys of a row and cancels.

Strengths: it ranks keys by distance, so a key cannot win by its length alone; of all keys the query itself
gets the largest weight.
Limitations: it cannot subtract, attend to nothing, or use the length of a key as a measure of its importance.
Trained softmax models do that, so swapping it in changes them a lot. Rotary positions keep lengths, so they
work.

>>> import torch, unsoft
>>> q = torch.tensor([[[[1.0, 0.0]]]])
>>> k = torch.tensor([[[[1.0, 0.0], [9.0, 0.0]]]])                       # near, and far in the same direction
>>> _, near_and_far = unsoft.attention(q, k, k, "rbf", return_weights=True)
>>> near_and_far.flatten().round(decimals=4)
tensor([1., 0.])
>>> unsoft.attention(q, k, k, "softmax", return_weights=True)[1].flatten().round(decimals=2)
tensor([0., 1.])
"""

import torch
from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Layer, WrittenCall, shares
from unsoft.modules.pointwise import field_family

RBF = Formula(
    weight="exp(2*s - k2 - m)",
    mass="exp(2*s - k2 - m)",
    peak="2*s - k2",
    bias="2*s",
    name="rbf",
    paper="Tsai et al. 2019, arXiv 1908.11775",
    summary="softmax over squared distances: near keys win, long ones do not",
    facts=Facts(signed=False),
)


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """softmax(-scale |q - k|^2), the differences written out row by row (Tsai et al. 2019)."""
    key = call.spread(call.key)
    rows = [(call.query[:, :, r, None] - key).square().sum(-1) for r in range(call.query.shape[2])]
    distances = torch.stack(rows, dim=2) if rows else call.query.new_zeros(call.visible.shape)
    return shares(call.bias - call.scale * distances, call.visible)


field_family("rbf", RBF)
