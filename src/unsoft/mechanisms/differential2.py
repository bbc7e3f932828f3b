"""differential2: the difference of two softmax maps over shared keys,
with a factor per token (Differential Transformer V2).

    out_h = A(q_2h, k) v - sigmoid(l_h) A(q_2h+1, k) v          l = W x for each token and head

Source: the authors' second version (January 2026, repository microsoft/unilm, Diff-Transformer-V2).

There are twice as many query heads as output heads, paired 2h and 2h + 1, so that both queries of a pair read
the same key head under grouped-query attention (the other pairing is wrong there). One fused call; keys and
cache are those of ordinary attention. x is the hidden state if ``hidden=`` brings it, otherwise the first
query of the pair stands in.

Ours, and not the authors': l has a constant per head besides W x, and W begins at 0, so that every token
begins with sigmoid(0) = 1/2 of the second map (the authors have no constant and a random W).

Strengths: it cancels what both maps agree on, by an amount that each token chooses. Rows sum to 1 -
sigmoid(l), in (0, 1).
Limitations: it cannot amplify; no norm follows, and weights lie in (-1, 1).

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> layer = Differential2(LayerSpec(heads=2, head_dim=4))
>>> layer(torch.randn(1, 4, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)).shape
torch.Size([1, 2, 5, 4])
"""

import torch
from torch import Tensor

from unsoft.formula import Formula, Interval, Properties
from unsoft.modules.definition import Layer, Pointwise, WrittenCall, logits_of, visible_part
from unsoft.modules.head_pairs import QueryPair
from unsoft.modules.module import Inputs, Result, TokenFactor
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec


class Differential2(QueryPair):
    """See the module's docstring."""

    def __init__(self, layer_spec: LayerSpec, base: Formula | None = None) -> None:
        super().__init__(layer_spec, base)
        self.factor = TokenFactor(layer_spec, width=1)

    @torch.no_grad()
    def open_start(self) -> None:
        """Subtract sigmoid(-4) = 0.02 of the second map."""
        self.factor.constant.fill_(-4.0)

    @property
    def query_heads(self) -> int:
        return 2 * self.layer_spec.heads

    def attend(self, inputs: Inputs) -> Result:
        if not self._fits(inputs):
            heads = inputs.query.shape[-3]
            raise ValueError(
                f"differential2: argument 'query' has {heads} heads (shape {tuple(inputs.query.shape)}); it"
                f" needs two for each of the {self.layer_spec.heads} heads of the output, {self.query_heads}"
            )
        return super().attend(inputs)

    def _fits(self, inputs: Inputs) -> bool:
        return inputs.query.shape[-3] == self.query_heads

    def _both(self, query: Tensor) -> Tensor:
        return query

    def _combined(self, inputs: Inputs, first: Tensor, second: Tensor) -> Tensor:
        """Return first - sigmoid(l) second, rounded once."""
        strength: Tensor = self.factor(inputs.query[..., 0::2, :, :], inputs.hidden).sigmoid()
        return inputs.rounded(first - strength * second)


def definition(call: WrittenCall, layer: Layer, formula: Pointwise) -> Tensor:
    """A(q_2h) - sigmoid(l_h) A(q_2h+1), with l linear in the first query (Ye et al. 2026)."""
    weights = visible_part(formula(logits_of(call)), call.visible)
    strength: Tensor = (call.query[:, 0::2] @ layer.factor.weight + layer.factor.constant[:, None]).sigmoid()
    return weights[:, 0::2] - strength * weights[:, 1::2]


family(
    "differential2",
    Differential2,
    summary="difference of two softmax maps by an amount each token chooses",
    paper="Ye et al. 2026, Diff-Transformer V2",
    properties=Properties(signed=True, row_sum=Interval(0, 1, open=True), l1=Interval(high=2, open=True)),
    base="softmax",
)
