"""relu: rectified logits divided by the number of keys.

    a_j = max(s_j, 0) / n

Paper: Wortsman et al., Replacing softmax with ReLU in Vision Transformers, arXiv 2309.08586 (there with the
fixed length L; here n counts the keys the row can see, so that a prefix never changes when the sequence
grows).

Strengths: it gives exact zeros and can attend to nothing.
Limitations: it cannot subtract and is not normalised; the row sum is free and grows with the logits, and a
single relevant key among many is divided by n. Where all logits are negative there is no gradient.

>>> import torch
>>> RELU.row(torch.tensor([-1.0, 3.0, 1.0, 0.0]))
tensor([0.0000, 0.7500, 0.2500, 0.0000])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits
from unsoft.modules.registry import builtin

RELU = Formula(
    weight="max(s, 0)/n",
    name="relu",
    paper="Wortsman et al. 2023, arXiv 2309.08586",
    summary="rectified, divided by the number of keys",
    facts=Facts(signed=False),
)


def definition(x: Logits) -> Tensor:
    return x.added.relu() * x.boost.exp() / x.n


builtin("relu", RELU)
