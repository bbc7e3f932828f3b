"""stick-breaking: every earlier key, the nearest first, takes its share of what nearer ones have left.

    a_ij = sigmoid(s_ij) * product over j < l < i of (1 - sigmoid(s_il))          j < i

Paper: Tan et al., Scaling Stick-Breaking Attention, arXiv 2410.17980 (ICLR 2025).

Strengths: it prefers the nearest of several keys that fit, without any position encoding, and can attend to
nothing (a row sums to what was taken, at most 1), so it needs no sink. Far keys cost nothing once nearer ones
have taken all: they are not even multiplied.
Limitations: it cannot subtract, or weight a far key that fits better above a near one that fits well. It
looks back only, and, as published, not at the token itself, whose row is 0 if nothing came before;
``current=True`` lets it take the first share.

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> zero = torch.zeros(1, 1, 3, 4)                          # sigmoid(0) = 1/2
>>> _, weights = StickBreaking(LayerSpec(1, 4))(zero, zero, zero, is_causal=True, return_weights=True)
>>> weights[0, 0]
tensor([[0.0000, 0.0000, 0.0000],
        [0.5000, 0.0000, 0.0000],
        [0.2500, 0.5000, 0.0000]])
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unsoft.engines.rows.rules import Sticks
from unsoft.formula import Interval, Properties
from unsoft.modules.definition import Layer, WrittenCall
from unsoft.modules.registry import family
from unsoft.modules.rows import RowCoupled
from unsoft.modules.spec import LayerSpec


class StickBreaking(RowCoupled):
    """See the module's docstring."""

    causal_only = True

    def __init__(self, layer_spec: LayerSpec, *, current: bool = False) -> None:
        super().__init__(layer_spec, Sticks())
        self.sees_itself = current


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """The product of the paper as a sum of logarithms over the keys between (Tan et al. 2024)."""
    place = call.rows[:, None]
    seen = call.visible & (call.keys <= place if layer.sees_itself else call.keys < place)
    logits = call.logits + call.bias
    left = torch.where(seen, logsigmoid(-logits), 0.0)
    between = torch.ones(left.shape[-1], left.shape[-1], dtype=left.dtype).tril(-1)  # l later than j
    return torch.where(seen, (logsigmoid(logits) + left @ between).exp(), 0.0)


family(
    "stick-breaking",
    StickBreaking,
    summary="the nearest key takes its share first, earlier ones of what is left",
    paper="Tan et al. 2024, arXiv 2410.17980",
    properties=Properties(signed=False, row_sum=Interval(0, 1), l1=Interval(0, 1)),
)
