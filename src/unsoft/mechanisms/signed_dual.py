"""signed-dual: softmax of the logits minus softmax of the negated logits.

    a_j = softmax_j(s) - softmax_j(-s)

Paper: Courvoisier and Cazenave, Signed Dual Attention: Capturing Signed Dependencies in Time Series
Forecasting, arXiv 2606.04833 (AI4TS workshop, AAAI 2026). The definition, (A+ - A-) V, is that of the first
author's article "Signed Dual Attention Explained"; the paper itself and its code were not available to us.

Strengths: it subtracts keys that are opposed to the query, without parameters, by an odd function of the
logits: -q gives the negated output. Each part keeps softmax's focus, where ``sinh`` divides both by one
total and ``cog`` jumps at 0.
Limitations: rows sum to 0, so it cannot pass on a mean, and a row that sees one key outputs 0. The most
opposed key always weighs as much as the best match, even if it is only irrelevant. It costs two maps. A float
mask multiplies the weights of both by its exponential.

>>> import math, torch
>>> from unsoft.modules.build import mechanism
>>> layer = mechanism("signed-dual", heads=1, head_dim=1)
>>> k = torch.tensor([math.log(3), 0.0]).view(1, 1, 2, 1)
>>> layer(torch.ones(1, 1, 1, 1), k, k, scale=1.0, return_weights=True)[1]      # 3/4 - 1/4 and 1/4 - 3/4
tensor([[[[ 0.5000, -0.5000]]]])
"""

from torch import Tensor

from unsoft.formula import Interval, Properties
from unsoft.modules.definition import Layer, Pointwise, WrittenCall, logits_of, visible_part
from unsoft.modules.head_pairs import QueryPair
from unsoft.modules.module import Inputs
from unsoft.modules.registry import family


class SignedDual(QueryPair):
    """See the module's docstring."""

    def second_query(self, query: Tensor) -> Tensor:
        return -query

    def factors(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        one = inputs.query.new_ones(())
        return one, one


def definition(call: WrittenCall, layer: Layer, formula: Pointwise) -> Tensor:
    """A(q) - A(-q) (Courvoisier and Cazenave 2026)."""
    first, second = (
        visible_part(formula(logits_of(call, q)), call.visible) for q in (call.query, -call.query)
    )
    return first - second


family(
    "signed-dual",
    SignedDual,
    summary="softmax of the logits minus softmax of the negated logits: rows sum to 0",
    paper="Courvoisier and Cazenave 2026, arXiv 2606.04833",
    properties=Properties(signed=True, row_sum=Interval(0, 0), l1=Interval(high=2)),
    base="softmax",
)
