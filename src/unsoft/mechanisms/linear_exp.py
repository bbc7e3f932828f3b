"""linear-exp: linear attention with exponential features.

    a_ij = sum_f exp(q_if + k_jf) / sum_l sum_f exp(q_if + k_lf)    q, k scaled so that q . k is the logit

Features are summed by their logarithms, each with its largest value so far taken out:
no size of logits is too large.

Strengths: the cost per token does not grow, and the state has a fixed size.
Limitations: it cannot focus; the sparsity of its rows is bounded by the signal-to-noise ratio of the key
features (Su 2023), and only more features help.

Masks that hide whole keys (padding) stay linear. A mask that depends on the query, a float mask (which
multiplies a weight by exp(mask)) and dropout need the weights written out, at quadratic cost.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("linear-exp", heads=2, head_dim=4)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> out, weights = layer(q, k, v, is_causal=True, return_weights=True)
>>> torch.allclose(out, weights @ v, atol=1e-6)
True
"""

from torch import Tensor

from unsoft.formula import ONE, Properties
from unsoft.modules.definition import Layer, WrittenCall, scaled, shares_of_sums
from unsoft.modules.linear import Linear, unchanged
from unsoft.modules.registry import family


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """sum over coordinates of exp(q + k), with q . k the logit."""
    query, key = scaled(call)
    return shares_of_sums(call, query, key)


family(
    "linear-exp",
    lambda layer_spec: Linear(layer_spec, unchanged, scaled=True, logarithmic=True, compiled_map="identity"),
    summary="linear attention with exponential features",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE),
)
