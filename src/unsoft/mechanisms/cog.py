"""cog: softmax over |s| that keeps the sign of s.

    a_j = sign(s_j) exp(|s_j|) / sum_k exp(|s_k|)

Paper: Lv et al., More Expressive Attention with Negative Weights, arXiv 2411.07176 (withdrawn from ICLR
2026).

Strengths: it subtracts. A key with a negative logit is removed, with strength, so one head can delete or
copy. The weights' absolute values sum to 1, the weights themselves to anything in [-1, 1].
Limitations: it cannot ignore a key. Near s = 0 the weight jumps from -1/Z to +1/Z, so low-precision logits
flip signs, and a row of tiny logits gives random +-1/n. Keys k and -k collide: where softmax returns the
value of k, sharp cog returns half the difference of both values. With a zero-initialised query the output and
every gradient are exactly 0 (sign(0) = 0), and training never starts. The paper keeps softmax in the first
and last layer. ``sinh`` is the smooth control for all of these.

>>> import math, torch
>>> COG.row(torch.tensor([math.log(3), -math.log(5)]))     # exp(|s|) = 3, 5
tensor([ 0.3750, -0.6250])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits, normalised
from unsoft.modules.registry import builtin

COG = Formula(
    weight="sign(s)*exp(abs(s) - m)",
    mass="exp(abs(s) - m)",
    peak="abs(s)",
    name="cog",
    paper="Lv et al. 2024, arXiv 2411.07176",
    summary="signed softmax: adds and subtracts",
    facts=Facts(signed=True),
)


def definition(x: Logits) -> Tensor:
    return normalised(x, [(x.s.sign(), x.s.abs())], [(1.0, x.s.abs())], x.bias)


builtin("cog", COG)
