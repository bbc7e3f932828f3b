"""sinh: the smooth relative of cog.

    a_j = sinh(s_j) / sum_k cosh(s_k)

Our own control for cog; whether it is new is not established. It equals a mix of
softmax(s) and -softmax(-s), so it could be computed by two ordinary attention calls. expdiff(a, b,
m) is exp(a - m) - exp(b - m), without the cancellation of a plain difference at small logits.

Strengths: it subtracts like cog, and passes smoothly through exactly 0 at s = 0, so a key can be ignored and
training can start from zero. The absolute weights sum to less than 1.
Limitations: it is weak at small logits: it switches off where cog does not (close to cog at logit spread 2,
far from it below 1). Keys k and -k still collide.

>>> import math, torch
>>> s = torch.tensor([math.log(2), -math.log(3)])      # sinh = 3/4, -4/3; cosh = 5/4, 5/3, in sum 35/12
>>> SINH.row(s) * 35
tensor([  9.0000, -16.0000])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits, normalised
from unsoft.modules.registry import builtin

SINH = Formula(
    weight="expdiff(s, -s, m)/2",
    mass="(exp(s - m) + exp(-s - m))/2",
    peak="abs(s)",
    name="sinh",
    summary="smooth cog: sinh(s) over the sum of cosh(s)",
    facts=Facts(signed=True),
)


def definition(x: Logits) -> Tensor:
    return normalised(x, [(0.5, x.s), (-0.5, -x.s)], [(0.5, x.s), (0.5, -x.s)], x.bias)


builtin("sinh", SINH)
