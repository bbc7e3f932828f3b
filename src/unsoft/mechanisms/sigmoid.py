"""sigmoid: every key decides for itself.

    a_j = 1 / (1 + exp(log(n) - s_j))

Paper: Ramapuram et al., Theory, Analysis, and Best Practices for Sigmoid Self-Attention, arXiv 2409.04431.
The bias -log n makes a row of zero logits sum to about 1, like softmax. The paper fixes it from the training
length; here n counts the keys the row can see.

Strengths: it attends to many keys fully or to none; keys do not compete, so no reduction over the row is
needed.
Limitations: it cannot subtract or give an exact zero. The row sum is free, between 0 and n; large models need
an extra norm or LayerScale to train stably.

>>> import math, torch
>>> SIGMOID.row(torch.tensor([math.log(2), math.log(6)]))      # s - log(2) = log(1), log(3)
tensor([0.5000, 0.7500])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits
from unsoft.modules.registry import builtin

SIGMOID = Formula(
    weight="sigmoid(s - log(n))",
    name="sigmoid",
    paper="Ramapuram et al. 2024, arXiv 2409.04431",
    summary="independent gates, no competition",
    facts=Facts(signed=False),
)


def definition(x: Logits) -> Tensor:
    return (x.added - x.n.log()).sigmoid() * x.boost.exp()


builtin("sigmoid", SIGMOID)
