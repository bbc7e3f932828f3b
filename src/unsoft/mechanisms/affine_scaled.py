"""affine-scaled: softmax weights times a factor of the token, plus a constant for all keys.

    a_ij = alpha_i softmax_j(s_ij) + (c - alpha_i) / n          alpha_i = clamp(0.1 x_i w + 0.5, 0, 1)

Paper: Bae et al., Affine-Scaled Attention: Towards Flexible and Stable Transformer Attention, arXiv
2602.23057, equations 6-9 and 11 (the clamp is their "linear clipping"; no code is public). c is a running
mean of alpha, one per head: every training step replaces it by 0.9 c + 0.1 mean(alpha).
x is the hidden state if ``hidden=`` brings it, otherwise the query.

Ours: n counts the keys that the row sees, where the paper takes the length of the sequence; w begins at 0 and
has a constant besides, so alpha begins at 0.5, and so does c (the paper's at 0); the mean is taken per head,
over all tokens of a batch. Like those of batch normalisation, the means change in training mode only: call
``eval()`` to compare outputs.

Strengths: each token chooses between its match and the plain mean of all values, so a head can ignore its
keys without a sink.
Limitations: although presented as freeing the row sum, rows sum to c, the same for all tokens: it scales what
differs from the mean. Weights are negative only where alpha_i > c, and never below (c - alpha_i) / n. It
costs two maps. A float mask also weighs the keys of the mean.

>>> import math, torch
>>> from unsoft.modules.build import mechanism
>>> layer = mechanism("affine-scaled", heads=1, head_dim=1).eval()
>>> k = torch.tensor([math.log(3), 0.0]).view(1, 1, 2, 1)
>>> layer(torch.ones(1, 1, 1, 1), k, k, scale=1.0, return_weights=True)[1][0, 0]      # (3/4, 1/4) / 2
tensor([[0.3750, 0.1250]], grad_fn=<SelectBackward0>)
"""

import torch
from torch import Tensor

from unsoft.formula import Formula, Interval, Properties
from unsoft.modules.definition import Layer, Pointwise, WrittenCall, logits_of, visible_part
from unsoft.modules.head_pairs import QueryPair
from unsoft.modules.module import Inputs, Result, TokenFactor
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec

_SLOPE, _MIDDLE = 0.1, 0.5
_OPEN = 4.8
"""alpha = 0.98: just inside the clamp, beyond which there is no gradient."""


class AffineScaled(QueryPair):
    """See the module's docstring. ``momentum``: how much of the running mean a training step keeps."""

    uses_hidden = True

    def __init__(self, layer_spec: LayerSpec, base: Formula | None = None, *, momentum: float = 0.9) -> None:
        super().__init__(layer_spec, base)
        if not 0 <= momentum <= 1:
            raise ValueError(f"affine-scaled: argument 'momentum' must lie in [0, 1], not {momentum!r}")
        self.momentum = momentum
        self.factor = TokenFactor(layer_spec, width=1)
        self.mean: Tensor
        self.register_buffer("mean", torch.full((layer_spec.heads,), _MIDDLE))

    @torch.no_grad()
    def open_start(self) -> None:
        """Begin with 0.98 of softmax and 0.02 of the plain mean."""
        self.factor.constant.fill_(_OPEN)
        self.mean.fill_(1.0)

    def alpha(self, inputs: Inputs) -> Tensor:
        """Return the factors (..., heads, L, 1) of the tokens."""
        alpha: Tensor = (_SLOPE * self.factor(inputs.query, inputs.hidden) + _MIDDLE).clamp(0, 1)
        return alpha

    def second_query(self, query: Tensor) -> Tensor:
        return torch.zeros_like(query)  # all logits are 0: the plain mean

    def factors(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        alpha = self.alpha(inputs)
        return alpha, alpha - self.mean.to(alpha.dtype)[:, None, None]

    def attend(self, inputs: Inputs) -> Result:
        if self.training:
            with torch.no_grad():
                alpha = self.alpha(inputs).transpose(-3, 0).flatten(1)
                self.mean.lerp_(alpha.mean(1).to(self.mean.dtype), 1 - self.momentum)
        return super().attend(inputs)


def definition(call: WrittenCall, layer: Layer, formula: Pointwise) -> Tensor:
    """alpha A(q) + (c - alpha) A(0), with A(0) = 1/n (Bae et al. 2026)."""
    x = call.query @ layer.factor.weight + layer.factor.constant[:, None]
    alpha = (0.1 * x + 0.5).clamp(0, 1)
    first, mean = (
        visible_part(formula(logits_of(call, q)), call.visible) for q in (call.query, 0 * call.query)
    )
    weights: Tensor = alpha * first + (layer.mean[:, None, None] - alpha) * mean
    return weights


def _row_sum(layer: AffineScaled) -> tuple[Tensor, Tensor]:
    return layer.mean[:, None], layer.mean[:, None]


family(
    "affine-scaled",
    AffineScaled,
    summary="softmax scaled by a factor of the token, plus a constant for all keys",
    paper="Bae et al. 2026, arXiv 2602.23057",
    properties=Properties(
        signed=True, row_sum=Interval(text="mean of alpha", of_module=_row_sum), l1=Interval(high=2)
    ),
    base="softmax",
)
