"""entmax15: half way between softmax and sparsemax, alpha-entmax at alpha = 1.5.

    a_j = max(s_j / 2 - t, 0)^2          t such that the row sums to 1

Papers: Peters, Niculae and Martins, Sparse Sequence-to-Sequence Models, arXiv 1905.05702 (ACL 2019); fused on
GPUs: Goncalves et al., AdaSplash, arXiv 2502.12082.

Strengths: it ignores every key whose logit is 2 or more below the best; smooth where a key enters, unlike
sparsemax.
Limitations: it cannot subtract or attend to nothing (the row sum is 1). Keys that are ignored have no
gradient.

>>> import torch
>>> ENTMAX15.row(torch.tensor([2.0, 2.0, 0.0, -9.0]))     # t = 1 - 1/sqrt(2): 2 * (1/sqrt(2))^2 = 1
tensor([0.5000, 0.5000, 0.0000, 0.0000])
"""

import torch
from torch import Tensor

from unsoft.engines.rows.rules import Threshold
from unsoft.formula import ONE, Properties
from unsoft.modules.definition import Layer, WrittenCall
from unsoft.modules.registry import family
from unsoft.modules.rows import RowCoupled

ENTMAX15 = Threshold("max((s - m)/2 - t, 0)**2", straight="sqrt(z)")


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """Sort the logits (Peters et al. 2019): if the k largest x = s/2 are kept, t = M - sqrt((1 - k V) / k)
    with their mean M and variance V; right is the largest k for which t lies below the k-th."""
    hidden = ~call.visible
    x = ((call.logits + call.bias) / 2).masked_fill(hidden, -torch.inf)
    top = x.amax(-1, keepdim=True).detach()
    x = x - torch.where(top.isfinite(), top, 0.0)
    ordered = x.sort(-1, descending=True).values
    there = ordered > -torch.inf
    finite = ordered.masked_fill(~there, 0.0)
    k = torch.arange(1, ordered.shape[-1] + 1, dtype=ordered.dtype)
    mean, squares = finite.cumsum(-1) / k, finite.square().cumsum(-1) / k
    inside = (1 - k * (squares - mean.square())) / k
    t = mean - torch.where(inside > 0, inside, 1.0).sqrt() * (inside > 0)
    kept = ((t <= ordered) & there).sum(-1, keepdim=True)
    t = t.gather(-1, (kept - 1).clamp(min=0))
    return (x - t).clamp(min=0).square().masked_fill(hidden, 0.0)


family(
    "entmax15",
    lambda layer_spec: RowCoupled(layer_spec, ENTMAX15),
    summary="between softmax and sparsemax: squares above a threshold, exact zeros below",
    paper="Peters et al. 2019, arXiv 1905.05702",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE, sparse=True),
)
