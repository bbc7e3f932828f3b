"""softmax1: softmax with an option to attend to nothing.

    a_j = exp(s_j) / (1 + sum_k exp(s_k))

Source: Miller, Attention Is Off By One (2023). It equals softmax with one more key of logit 0 and value 0
(``nn.MultiheadAttention(add_zero_attn=True)``). The peak is max(s, 0), so that the extra exp(-m) never
overflows.

Strengths: a row fades to zero when all logits are very negative, which removes the need for attention sinks.
Limitations: it cannot subtract or give an exact zero; for large logits it is softmax. Longer rows have larger
sums, so the weight of "nothing" depends on length.

>>> import math, torch
>>> SOFTMAX1.row(torch.tensor([0.0, math.log(2)]))     # exp(s) = 1, 2; their sum with the extra 1 is 4
tensor([0.2500, 0.5000])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits, normalised
from unsoft.modules.registry import builtin

SOFTMAX1 = Formula(
    weight="exp(s - m)",
    mass="exp(s - m)",
    peak="max(s, 0)",
    offset_mass="exp(-m)",
    name="softmax1",
    paper="Miller 2023, Attention Is Off By One",
    summary="softmax that can attend to nothing",
    facts=Facts(signed=False),
)


def definition(x: Logits) -> Tensor:
    return normalised(x, [(1.0, x.s)], [(1.0, x.s)], x.bias, offsets=[0.0])


builtin("softmax1", SOFTMAX1)
