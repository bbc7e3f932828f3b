"""entmax: alpha-entmax with an alpha that every head learns, from softmax (1) to sparsemax (2).

    a_j = max((alpha - 1) s_j - t, 0)^(1 / (alpha - 1))          t such that the row sums to 1

Paper: Correia, Niculae and Martins, Adaptively Sparse Transformers, arXiv 1909.00015 (EMNLP 2019). As there,
alpha = 1 + sigmoid(x) stays between 1 and 2; x is what is learned. Gradients of alpha are exact.

Strengths: it learns how sharply to ignore; a key 1 / (alpha - 1) below the best gets weight 0.
``entmax(1.2)`` starts all heads at alpha = 1.2; the default is 1.5.
Limitations: it cannot subtract or attend to nothing (the row sum is 1). A learned power is slow: ``entmax15``
and ``sparsemax`` are its fast special cases.

>>> import torch
>>> ENTMAX.row(torch.tensor([3.0, 2.5, 0.0]), a=2.0)      # sparsemax
tensor([0.7500, 0.2500, 0.0000])
>>> ENTMAX.row(torch.tensor([0.0, 1.0]), a=1.001)         # nearly softmax: 0.2689, 0.7311
tensor([0.2688, 0.7312])
"""

import torch
from torch import Tensor, nn

from unsoft.engines.rows.rules import Threshold
from unsoft.formula import ONE, Properties
from unsoft.modules.definition import Layer, WrittenCall
from unsoft.modules.registry import family
from unsoft.modules.rows import RowCoupled
from unsoft.modules.spec import LayerSpec

ENTMAX = Threshold("max((a - 1)*(s - m) - t, 0)**(1/(a - 1))", straight="z**(a - 1)", params={"a": 1.5})
_HALVINGS = 80
"""The threshold lies in [-1, 0]: after 53 halvings float64 has no more digits."""


class Entmax(RowCoupled):
    """See the module's docstring."""

    def __init__(self, layer_spec: LayerSpec, alpha: float = 1.5) -> None:
        super().__init__(layer_spec, ENTMAX)
        if not 1 < alpha < 2:
            raise ValueError(f"entmax: argument 'alpha' must lie strictly between 1 and 2, not {alpha!r}")
        self.logit = nn.Parameter(torch.logit(torch.full((layer_spec.heads,), alpha - 1.0)))

    def params(self) -> dict[str, Tensor]:
        return {"a": 1 + self.logit.sigmoid()}


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """Bisect the threshold (Blondel et al. 2019): the sum of a row falls with t. A last step, too small to
    change t, gives it its derivatives by logits and alpha: those that keep the sum at 1."""
    power = layer.logit.sigmoid()[:, None, None]
    hidden = ~call.visible
    x = (power * (call.logits + call.bias)).masked_fill(hidden, -torch.inf)
    top = x.detach().amax(-1, keepdim=True)
    x = x - torch.where(top.isfinite(), top, 0.0)

    def weights(t: Tensor) -> Tensor:
        above = (x - t).clamp(min=0).masked_fill(hidden, 0.0)
        return torch.where(above > 0, torch.where(above > 0, above, 1.0) ** (1 / power), 0.0)

    with torch.no_grad():
        low, high = torch.full_like(top, -1.0), torch.zeros_like(top)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = weights(middle).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    # The derivative of t: sum w = 1 for all logits, and dw/dt = -w^(1 - power) / power.
    kept = weights(low)
    steep = torch.where(kept > 0, kept.detach().clamp(min=1e-300) ** (1 - power), 0.0) / power
    total = steep.sum(-1, keepdim=True).detach()
    moved = (kept.sum(-1, keepdim=True) - 1) / torch.where(total > 0, total, 1.0)
    return weights(low + moved)


family(
    "entmax",
    Entmax,
    summary="alpha-entmax with a learned alpha per head, from softmax to sparsemax",
    argument="alpha",
    paper="Correia et al. 2019, arXiv 1909.00015",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE, sparse=True),
)
