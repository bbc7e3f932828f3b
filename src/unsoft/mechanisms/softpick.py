"""softpick: rectified softmax.

    a_j = max(exp(s_j) - 1, 0) / sum_k |exp(s_k) - 1|

Paper: Zuhri et al., Softpick: No Attention Sink, No Massive Activations with Rectified Softmax, arXiv
2504.20966. The peak is max(s, 0): with the unclamped peak of the official code exp(-m) overflows for rows of
very negative logits. The paper's epsilon is replaced by the rule that a row of total mass 0 has weights 0.
|exp(s) - 1| is written exp(max(s, 0)) (1 - exp(-|s|)), which neither overflows nor cancels: logits of 1e-30
give the weights that their ratios say.

Can: give exact zeros and attend to nothing; negative logits take part in the normaliser, so they still
receive gradient.
Cannot: subtract. The row sum is at most 1. Reported to lag behind softmax in larger models and long contexts.

>>> import math, torch
>>> s = torch.tensor([math.log(3), math.log(2), -math.log(2)])     # exp(s) - 1 = 2, 1, -1/2
>>> SOFTPICK.row(s) * 7
tensor([4.0000, 2.0000, 0.0000])
"""

from unsoft.formula import Formula
from unsoft.formula.formula import Facts
from unsoft.mechanisms.core.registry import builtin

SOFTPICK = Formula(
    weight="max(-sign(s)*exp(max(s, 0) - m)*expm1(-abs(s)), 0)",
    mass="-exp(max(s, 0) - m)*expm1(-abs(s))",
    peak="max(s, 0)",
    name="softpick",
    paper="Zuhri et al. 2025, arXiv 2504.20966",
    summary="rectified softmax: exact zeros, no sink",
    facts=Facts(signed=False),
)
builtin("softpick", SOFTPICK)
