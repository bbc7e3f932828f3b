"""hstu: SiLU of every logit, divided by the number of keys; the attention of Meta's recommenders.

    a_j = s_j sigmoid(s_j) / n

Paper: Zhai et al., Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations, arXiv 2402.17152 (ICML 2024). Checked against ``pytorch_hstu_mha`` of
meta-recsys/generative-recommenders, which divides by the longest sequence of the batch; here n counts the
keys that the row sees. The paper adds a position bias to the logit; a float mask multiplies weights by its
exponential, as for all signed formulas here: ``HSTU.change(bias="logit")`` is the paper's form. The paper's
layer also normalises the output and multiplies it by SiLU(x W): ``gau+hstu`` is close to it.

Strengths: the row sum grows with the number and strength of matches, so intensity is kept where softmax
divides it away. Keys do not compete, and logits well below 0 are ignored.
Limitations: it barely subtracts: no weight is below -0.278/n, and a strongly negative logit counts as
nothing. The row sum is free and there is no exact zero; a norm should follow.

>>> import math, torch
>>> HSTU.row(torch.tensor([math.log(3), -math.log(3)]))      # sigmoid = 3/4 and 1/4
tensor([ 0.4120, -0.1373])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits
from unsoft.modules.registry import builtin

HSTU = Formula(
    weight="s*sigmoid(s)/n",
    name="hstu",
    paper="Zhai et al. 2024, arXiv 2402.17152",
    summary="SiLU of every logit over the number of keys, for recommenders",
    facts=Facts(signed=True),
)


def definition(x: Logits) -> Tensor:
    return x.s * x.s.sigmoid() * x.bias.exp() / x.n


builtin("hstu", HSTU)
