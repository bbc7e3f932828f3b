"""linear-relu: linear attention with rectified features.

    a_ij = relu(q_i) . relu(k_j) / sum_l relu(q_i) . relu(k_l)

No 1/sqrt(d): ``scale=`` has no effect, it would cancel. A row whose features are 0, or so small that nothing
can be divided by them (below 1e-31 in float32), outputs 0.

Strengths: the cost per token does not grow, and the state has a fixed size.
Limitations: it cannot focus; the sparsity of its rows is bounded by the signal-to-noise ratio of the key
features (Su 2023), and only more features help.

Masks that hide whole keys (padding) stay linear. A mask that depends on the query, a float mask (which
multiplies a weight by exp(mask)) and dropout need the weights written out, at quadratic cost.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("linear-relu", heads=2, head_dim=4)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> out, weights = layer(q, k, v, is_causal=True, return_weights=True)
>>> torch.allclose(out, weights @ v, atol=1e-6)
True
"""

import torch
from torch import Tensor

from unsoft.formula import ONE, Properties
from unsoft.modules.definition import Layer, WrittenCall, over_sum
from unsoft.modules.linear import Linear
from unsoft.modules.registry import family


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """relu(q) . relu(k), over its sum."""
    return over_sum(call, call.move(call.query.relu() @ call.spread(call.key).relu().mT))


family(
    "linear-relu",
    lambda layer_spec: Linear(layer_spec, torch.relu, compiled_map="relu"),
    summary="linear attention with rectified features",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE, sparse=True),
)
