"""softmax: exp(s) over the sum of exp(s).

    a_j = exp(s_j) / sum_k exp(s_k)

Paper: Vaswani et al., Attention Is All You Need, arXiv 1706.03762.

Strengths: it ranks keys and averages their values; every row is a probability distribution, the same at every
length.
Limitations: it cannot subtract (no negative weights), attend to nothing (the row sum is 1 even if no key
fits, hence attention sinks), give an exact zero, or ignore a crowd: n copies of a key get n times the weight.

>>> import math, torch
>>> SOFTMAX.row(torch.tensor([0.0, math.log(3)]))      # exp(s) = 1, 3
tensor([0.2500, 0.7500])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits, normalised
from unsoft.modules.registry import builtin

SOFTMAX = Formula(
    weight="exp(s - m)",
    mass="exp(s - m)",
    peak="s",
    name="softmax",
    paper="Vaswani et al. 2017, arXiv 1706.03762",
    summary="a probability distribution over the keys",
    facts=Facts(signed=False),
)


def definition(x: Logits) -> Tensor:
    return normalised(x, [(1.0, x.s)], [(1.0, x.s)], x.bias)


builtin("softmax", SOFTMAX)
