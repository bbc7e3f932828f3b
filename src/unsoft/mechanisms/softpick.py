"""softpick: rectified softmax.

    a_j = max(exp(s_j) - 1, 0) / sum_k |exp(s_k) - 1|

Paper: Zuhri et al., Softpick: No Attention Sink, No Massive Activations with Rectified Softmax, arXiv
2504.20966. The peak is max(s, 0): with the unclamped peak of the official code exp(-m) overflows for rows of
very negative logits. The paper's epsilon is replaced by the rule that a row of total mass 0 has weights 0.
exp(s) - 1 is written with expdiff(a, b, m) = exp(a - m) - exp(b - m), which neither overflows nor cancels:
logits of 1e-30 give the weights that their ratios say.

Strengths: it gives exact zeros and can attend to nothing; negative logits take part in the normaliser, so
they still receive gradient.
Limitations: it cannot subtract. The row sum is at most 1. Reported to lag behind softmax in larger models and
long contexts.

>>> import math, torch
>>> s = torch.tensor([math.log(3), math.log(2), -math.log(2)])     # exp(s) - 1 = 2, 1, -1/2
>>> SOFTPICK.row(s) * 7
tensor([4.0000, 2.0000, 0.0000])
"""

import torch
from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits, normalised
from unsoft.modules.registry import builtin

SOFTPICK = Formula(
    weight="max(expdiff(s, 0, m), 0)",
    mass="abs(expdiff(s, 0, m))",
    peak="max(s, 0)",
    name="softpick",
    paper="Zuhri et al. 2025, arXiv 2504.20966",
    summary="rectified softmax: exact zeros, no sink",
    facts=Facts(signed=False),
)


def definition(x: Logits) -> Tensor:
    """exp(s) - 1 is exp(max(s, 0)) times 1 - exp(-|s|), with the sign of s."""
    s = x.added
    size = -torch.expm1(-s.abs())
    return normalised(x, [(size * (s > 0), s.relu())], [(size, s.relu())], x.boost)


builtin("softpick", SOFTPICK)
