"""l2: exponentials normalised to length 1 instead of sum 1.

    a_j = exp(s_j) / sqrt( sum_k exp(2 s_k) )

Source: Su 2022, kexue.fm/archives/9105, on a theoretical flaw of relative positions: where every row sums to
1, equal values give equal outputs at every position, whatever relative positions do to the logits. Rows whose
squares sum to 1 do not have it.

Strengths: it keeps the size of the output when many keys agree in weight but their values are independent
(the variance of the sum is kept, not the mean).
Limitations: it cannot subtract, attend to nothing or give an exact zero. The row sum lies between 1 and
sqrt(n), so it grows with length.

>>> import math, torch
>>> L2.row(torch.tensor([math.log(3), math.log(4)]))       # 3, 4 over 5
tensor([0.6000, 0.8000])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits, normalised
from unsoft.modules.registry import builtin

L2 = Formula(
    weight="exp(s - m)",
    mass="exp(s - m)**2",
    peak="s",
    norm="sqrt",
    name="l2",
    paper="Su 2022, kexue.fm/archives/9105",
    summary="squares of the weights sum to 1",
    facts=Facts(signed=False, mass_degree=2.0),
)


def definition(x: Logits) -> Tensor:
    return normalised(x, [(1.0, x.s)], [(1.0, x.s)], x.bias, power=2.0)


builtin("l2", L2)
