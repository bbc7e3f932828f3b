"""tanh: bounded signed weights divided by the number of keys.

    a_j = tanh(s_j) / n

The division by n is our choice: it keeps the row's absolute sum below 1, as relu and identity are scaled
here. CoDA (Tay et al., NeurIPS 2019) uses tanh in a different, gated form.

Strengths: it subtracts, passes smoothly through 0, and stays bounded however large the logits are.
Limitations: it cannot focus: no key gets more than 1/n, so one relevant key among many is lost. Saturated
logits get no gradient.

>>> import math, torch
>>> TANH.row(torch.tensor([math.log(2), -math.log(3)]))        # tanh = 3/5, -4/5
tensor([ 0.3000, -0.4000])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits
from unsoft.modules.registry import builtin

TANH = Formula(
    weight="tanh(s)/n",
    name="tanh",
    summary="bounded signed gates, divided by the number of keys",
    facts=Facts(signed=True),
)


def definition(x: Logits) -> Tensor:
    return x.s.tanh() * x.bias.exp() / x.n


builtin("tanh", TANH)
