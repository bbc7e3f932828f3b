"""elastic: softmax with its smallest weights cut off, so that a row may sum to less than 1.

    a_j = max(exp(s_j) / sum_k exp(s_k) + tau / n, 0)          n: keys the row sees

Paper: Elastic-Softmax of Lazy Attention (Attention Needs to Focus, 2026, arXiv 2601.00919). tau is one number
per head, learned, and starts at -1: what gets less than an equal share gets nothing.

Strengths: it can attend to nothing (equal logits give weights of exactly 0) and give exact zeros; no sink is
needed.
Limitations: it cannot subtract. The row sum lies between 0 and 1 for tau below 0. Keys that are cut off have
a gradient through the normaliser only.

>>> import math, torch
>>> ELASTIC.row(torch.tensor([0.0, math.log(3)]), tau=-1.0)      # 1/4 and 3/4, less 1/2
tensor([0.0000, 0.2500])
"""

import torch
from torch import Tensor, nn

from unsoft.engines.rows.rules import Threshold
from unsoft.formula import Interval, Properties
from unsoft.modules.definition import Layer, WrittenCall, shares
from unsoft.modules.registry import family
from unsoft.modules.rows import RowCoupled
from unsoft.modules.spec import LayerSpec

ELASTIC = Threshold(
    "max(exp(s - m - t) + tau/n, 0)",
    "exp(s - m - t)",
    low=0,
    high="log(n) + 1",
    straight="log(z)",
    params={"tau": -1.0},
)


class Elastic(RowCoupled):
    """See the module's docstring."""

    def __init__(self, layer_spec: LayerSpec, tau: float = -1.0) -> None:
        super().__init__(layer_spec, ELASTIC)
        self.tau = nn.Parameter(torch.full((layer_spec.heads,), float(tau)))

    def params(self) -> dict[str, Tensor]:
        return {"tau": self.tau}


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """ReLU(softmax + tau / n), as in the paper."""
    weights = shares(call.logits + call.bias, call.visible) + layer.tau[:, None, None] / call.count
    return torch.where(call.visible, weights.relu(), 0.0)


family(
    "elastic",
    Elastic,
    summary="softmax with its smallest weights cut off; the row sum may fall below 1",
    argument="tau",
    paper="Lazy Attention 2026, arXiv 2601.00919",
    properties=Properties(
        signed=False, row_sum=Interval(high=1), l1=Interval(high=1), sparse=True, needs_length=True
    ),
)
