"""linear-taylor2: linear attention with the second-order Taylor polynomial of exp.

    a_ij = p(s_ij) / sum_l p(s_il)          p(s) = 1 + s + s^2 / 2 > 0

As features: (1, x, x x^T / sqrt 2), 1 + D + D^2 of them.

Strengths: the cost per token does not grow, and the state has a fixed size.
Limitations: it cannot focus; the sparsity of its rows is bounded by the signal-to-noise ratio of the key
features (Su 2023), and only more features help.

Masks that hide whole keys (padding) stay linear. A mask that depends on the query, a float mask (which
multiplies a weight by exp(mask)) and dropout need the weights written out, at quadratic cost.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("linear-taylor2", heads=2, head_dim=4)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> out, weights = layer(q, k, v, is_causal=True, return_weights=True)
>>> torch.allclose(out, weights @ v, atol=1e-6)
True
"""

import math

import torch
from torch import Tensor

from unsoft.formula import ONE, Properties
from unsoft.modules.definition import Layer, WrittenCall, over_sum
from unsoft.modules.linear import Linear
from unsoft.modules.registry import family


def taylor2(x: Tensor) -> Tensor:
    """Return features whose dot product is 1 + s + s^2 / 2, the second-order Taylor polynomial of exp(s): F =
    1 + D + D^2."""
    squares = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
    return torch.cat([torch.ones_like(x[..., :1]), x, squares], dim=-1)


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """1 + s + s^2 / 2, over its sum."""
    s = call.logits
    return over_sum(call, 1 + s + s**2 / 2)


family(
    "linear-taylor2",
    lambda layer_spec: Linear(layer_spec, taylor2, scaled=True),
    summary="linear attention with the Taylor features of exp",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE),
)
