"""identity: the logits themselves, divided by the number of keys.

    a_j = s_j / n

This is linear attention without a feature map: sum_j (q.k_j) v_j / n. The ``linear`` engines of later
versions compute it in O(length); here it runs like every other formula.

Strengths: it subtracts, with a smooth weight through 0; it is the cheapest mechanism.
Limitations: it cannot focus: weights grow only in proportion to the logit, so one key never stands out from a
crowd. The row sum is free.

>>> import torch
>>> IDENTITY.row(torch.tensor([1.0, -2.0, 3.0, 2.0]))
tensor([ 0.2500, -0.5000,  0.7500,  0.5000])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits
from unsoft.modules.registry import builtin

IDENTITY = Formula(
    weight="s/n", name="identity", summary="linear attention: the plain logit", facts=Facts(signed=True)
)


def definition(x: Logits) -> Tensor:
    return x.s * x.bias.exp() / x.n


builtin("identity", IDENTITY)
