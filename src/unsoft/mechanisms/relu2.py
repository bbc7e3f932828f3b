"""relu2: squared rectified logits divided by the number of keys.

    a_j = max(s_j, 0)^2 / n

Paper: Hua et al., Transformer Quality in Linear Time (GAU), arXiv 2202.10447. Implementations disagree: some
divide the logit by n before squaring (1/n^2), some the square (1/n). This is the 1/n form, n counted per row.

Strengths: it gives exact zeros and focuses more sharply than relu, with a continuous slope.
Limitations: it cannot subtract and is not normalised; the row sum is free and grows with the square of the
logits. There is no gradient where all logits are negative.

>>> import torch
>>> RELU2.row(torch.tensor([-1.0, 2.0, 1.0, 0.0]))
tensor([0.0000, 1.0000, 0.2500, 0.0000])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits
from unsoft.modules.registry import builtin

RELU2 = Formula(
    weight="max(s, 0)**2/n",
    name="relu2",
    paper="Hua et al. 2022, arXiv 2202.10447",
    summary="squared rectified, divided by the number of keys",
    facts=Facts(signed=False),
)


def definition(x: Logits) -> Tensor:
    return x.added.relu() ** 2 * x.boost.exp() / x.n


builtin("relu2", RELU2)
