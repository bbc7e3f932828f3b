"""polynomial(p): a power of the logit over the root of the number of keys.

    a_j = s_j^p / sqrt(n)

Paper: Saratchandran et al., Rethinking Attention: Polynomial Alternatives to Softmax, arXiv 2410.18613, which
argues that softmax works because it bounds the size of the attention matrix, and that this scaling does so
too.

Strengths: it subtracts for odd p, and passes smoothly through 0; an even p treats k and -k alike and never
subtracts.
Limitations: it is not normalised; the row sum is free and grows with the p-th power of the logits, so large
logits need care.

>>> import torch
>>> polynomial(3).row(torch.tensor([2.0, -1.0, 0.0, 1.0]))
tensor([ 4.0000, -0.5000,  0.0000,  0.5000])
"""

from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Logits, Pointwise
from unsoft.modules.registry import builtin


def polynomial(p: int = 3) -> Formula:
    """Return the formula s**p / sqrt(n) for a whole power p from 1 to 64."""
    if isinstance(p, bool) or not isinstance(p, int) or not 1 <= p <= 64:
        raise ValueError(
            f"mechanism: the power p of polynomial(p) must be a whole number from 1 to 64, not {p!r}"
        )
    return Formula(
        weight=f"s**{p}/sqrt(n)",
        name=f"polynomial({p})",
        paper="Saratchandran et al. 2024, arXiv 2410.18613",
        summary="a power of the logit over the root of the number of keys",
        facts=Facts(signed=p % 2 == 1),
    )


def definition(p: int = 3) -> Pointwise:
    """Odd powers are signed: the float mask acts on the strength."""

    def weights(x: Logits) -> Tensor:
        power = x.s**p * x.bias.exp() if p % 2 else x.added**p * x.boost.exp()
        return power / x.n.sqrt()

    return weights


builtin("polynomial", polynomial)
