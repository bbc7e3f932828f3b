"""sparsemax: the point of the simplex nearest to the logits; far ones get exactly nothing.

    a_j = max(s_j - t, 0)          t such that the row sums to 1

Paper: Martins and Astudillo, From Softmax to Sparsemax, arXiv 1602.02068 (ICML 2016).

Strengths: it ignores every key whose logit is 1 or more below the best, and averages the values of the rest,
as softmax does; many copies of a key below the threshold change nothing.
Limitations: it cannot subtract (no negative weights) or attend to nothing (the row sum is 1). The gradient is
0 for ignored keys, so only other rows can bring a lost key back.

>>> import torch
>>> SPARSEMAX.row(torch.tensor([3.0, 2.5, 0.0]))      # t = 2.25: 0.75 + 0.25
tensor([0.7500, 0.2500, 0.0000])
"""

import torch
from torch import Tensor

from unsoft.engines.rows.rules import Threshold
from unsoft.formula import ONE, Properties
from unsoft.modules.definition import Layer, WrittenCall
from unsoft.modules.registry import family
from unsoft.modules.rows import RowCoupled

SPARSEMAX = Threshold("max(s - m - t, 0)")


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """Sort the logits, as in the paper (Martins and Astudillo 2016): the k largest logits are kept for the
    largest k with 1 + k s_(k) > sum of the k largest, and t = (that sum - 1) / k."""
    hidden = ~call.visible
    logits = (call.logits + call.bias).masked_fill(hidden, -torch.inf)
    ordered = logits.sort(-1, descending=True).values
    k = torch.arange(1, ordered.shape[-1] + 1, dtype=ordered.dtype)
    sums = ordered.masked_fill(ordered == -torch.inf, 0.0).cumsum(-1)
    kept = (1 + k * ordered > sums).sum(-1, keepdim=True)
    t = (sums.gather(-1, (kept - 1).clamp(min=0)) - 1) / kept.clamp(min=1)
    return (logits - t).relu().masked_fill(hidden, 0.0)


family(
    "sparsemax",
    lambda layer_spec: RowCoupled(layer_spec, SPARSEMAX),
    summary="the point of the simplex nearest to the logits: far keys get exactly nothing",
    paper="Martins and Astudillo 2016, arXiv 1602.02068",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE, sparse=True),
)
