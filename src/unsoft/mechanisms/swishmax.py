"""swishmax: s exp(s) over one plus its absolute sum.

    a_j = s_j exp(s_j) / (1 + sum_k |s_k exp(s_k)|)

The peak is max(s, 0): then neither exp(s - m) nor the extra exp(-m) can overflow, and |s| is the largest
factor left.

Strengths: it subtracts a little (s exp(s) is never below -1/e before normalising), ignores a key smoothly at
s = 0, and can attend to nothing. The absolute weights sum to less than 1.
Limitations: it cannot subtract strongly: against one positive logit of 3 the strongest negative weight is
below 1%. Very negative logits are ignored rather than subtracted.

>>> import torch
>>> SWISHMAX.row(torch.tensor([1.0, -1.0]))        # e = 2.71828 and -1/e = -0.36788 over 4.08616
tensor([ 0.6652, -0.0900])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits, normalised
from unsoft.modules.registry import builtin

SWISHMAX = Formula(
    weight="s*exp(s - m)",
    mass="abs(s)*exp(s - m)",
    peak="max(s, 0)",
    offset_mass="exp(-m)",
    name="swishmax",
    summary="smooth, mildly signed, can attend to nothing",
    facts=Facts(signed=True),
)


def definition(x: Logits) -> Tensor:
    return normalised(x, [(x.s, x.s)], [(x.s.abs(), x.s)], x.bias, offsets=[0.0])


builtin("swishmax", SWISHMAX)
