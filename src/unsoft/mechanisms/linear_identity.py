"""linear-identity: the formula ``identity`` in linear time.

    a_ij = s_ij / n          n: the number of keys that row i sees; signed, not normalised

Strengths: the cost per token does not grow, and the state has a fixed size.
Limitations: it cannot focus; the sparsity of its rows is bounded by the signal-to-noise ratio of the key
features (Su 2023), and only more features help.

Masks that hide whole keys (padding) stay linear. A mask that depends on the query, a float mask (which
multiplies a weight by exp(mask)) and dropout need the weights written out, at quadratic cost.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("linear-identity", heads=2, head_dim=4)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> out, weights = layer(q, k, v, is_causal=True, return_weights=True)
>>> torch.allclose(out, weights @ v, atol=1e-6)
True
"""

from torch import Tensor

from unsoft.formula import Properties
from unsoft.modules.definition import Layer, WrittenCall, mask_factor
from unsoft.modules.linear import Linear, unchanged
from unsoft.modules.registry import family


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """s / n."""
    return call.logits * mask_factor(call) / call.count


family(
    "linear-identity",
    lambda layer_spec: Linear(
        layer_spec, unchanged, scaled=True, normaliser="count", compiled_map="identity"
    ),
    summary="the formula identity in linear time",
    properties=Properties(signed=True, needs_length=True),
)
