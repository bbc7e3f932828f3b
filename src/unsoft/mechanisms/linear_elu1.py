"""linear-elu1: linear attention with elu(x) + 1 features, positive everywhere.

    a_ij = g(q_i) . g(k_j) / sum_l g(q_i) . g(k_l)          g(x) = elu(x) + 1:  x + 1 above 0, exp(x) below

Paper: Katharopoulos et al., Transformers are RNNs, arXiv 2006.16236. No 1/sqrt(d): ``scale=`` has no effect.

Strengths: the cost per token does not grow, and the state has a fixed size.
Limitations: it cannot focus; the sparsity of its rows is bounded by the signal-to-noise ratio of the key
features (Su 2023), and only more features help.

Masks that hide whole keys (padding) stay linear. A mask that depends on the query, a float mask (which
multiplies a weight by exp(mask)) and dropout need the weights written out, at quadratic cost.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("linear-elu1", heads=2, head_dim=4)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> out, weights = layer(q, k, v, is_causal=True, return_weights=True)
>>> torch.allclose(out, weights @ v, atol=1e-6)
True
"""

import torch
from torch import Tensor

from unsoft.formula import ONE, Properties
from unsoft.modules.definition import Layer, WrittenCall, shares_of_sums
from unsoft.modules.linear import Linear
from unsoft.modules.registry import family


def elu1(x: Tensor) -> Tensor:
    """Return elu(x) + 1, positive everywhere (Katharopoulos et al., arXiv 2006.16236)."""
    return torch.nn.functional.elu(x) + 1


def elu1_of_query(x: Tensor) -> Tensor:
    """:func:`elu1`, where a row of negative numbers only, whose features are exp(x),
    has the largest brought to 1.

    Normalising undoes that, and a row below -87 does not vanish in float32.

    >>> import torch
    >>> elu1_of_query(torch.tensor([[1.0, -200.0], [-200.0, -200.0]]))
    tensor([[2., 0.],
            [1., 1.]])
    """
    below = x.detach().amax(-1, keepdim=True).clamp(max=0)
    return torch.where(x > 0, x + 1, (x.clamp(max=0) - below).clamp(max=0).exp())


def _log_elu1(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.log1p(x.relu()), x.clamp(max=0))


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """elu(x) + 1 is exp(x) for negative x (Katharopoulos et al. 2020)."""
    return shares_of_sums(call, _log_elu1(call.query), _log_elu1(call.spread(call.key)))


family(
    "linear-elu1",
    lambda layer_spec: Linear(layer_spec, elu1_of_query, elu1, compiled_map="elu1"),
    summary="linear attention with elu(x) + 1 features",
    paper="Katharopoulos et al. 2020, arXiv 2006.16236",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE),
)
