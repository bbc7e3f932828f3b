"""asentmax: 1.5-entmax whose sharpness grows with the length, by an amount that every token chooses.

    a_j = max(f_i s_j / 2 - t, 0)^2          f_i = 1 + beta_i log(n + 1)^gamma_i,   t: the row sums to 1
    beta_i = softplus(x_i w + b)             gamma_i = 2 tanh(x_i u + c)

Paper: Vasylenko et al., Long-Context Generalization with Sparse Attention, arXiv 2506.16640 (ICLR 2026;
adaptive-scalable entmax). f is checked against the authors' code (deep-spin/asentmax, ``sparse_gemma.py``,
"adapt-softplus-tanh"): the 1 before beta, the factor 2 of tanh and the + 1 in the logarithm, without which a
negative gamma divides by 0, are its defaults. There the logarithm is of the position; here n counts the keys
that the row sees, which is the same in a causal row without a mask. The authors combine it with ALiBi on
half of the heads, which is not part of this mechanism.
x is the hidden state if ``hidden=`` brings it, otherwise the query. Ours: w and u begin at 0.

Strengths: exact zeros, and a row that stays as sharp when it gets longer: entmax alone spreads over more and
more keys, ``ssmax`` alone never gives 0.
Limitations: it cannot subtract or attend to nothing (the row sum is 1). Keys that are ignored have no
gradient. It needs the hidden state to choose well. A float mask is added after the factor.

>>> import torch
>>> from unsoft.modules.build import mechanism
>>> layer = mechanism("asentmax", heads=1, head_dim=1)                  # f = 1 + log(2) for every n
>>> k = torch.tensor([1.0, 1.0, -1.0]).view(1, 1, 3, 1)
>>> layer(torch.ones(1, 1, 1, 1), k, k, return_weights=True)[1][0, 0]   # f * 2 exceeds 2: ignored
tensor([[0.5000, 0.5000, 0.0000]], grad_fn=<SelectBackward0>)
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from unsoft.engines.arguments import with_leading
from unsoft.engines.call import Needs
from unsoft.formula import ONE, Properties
from unsoft.mechanisms import entmax15
from unsoft.modules.definition import Layer, WrittenCall
from unsoft.modules.module import Inputs, Result, TokenFactor
from unsoft.modules.registry import family
from unsoft.modules.rows import RowCoupled
from unsoft.modules.spec import LayerSpec

_COUNTED = Needs(uses=frozenset("n"))
_GAMMA_RANGE = 2.0


class ASEntmax(RowCoupled):
    """See the module's docstring."""

    uses_hidden = True

    def __init__(self, layer_spec: LayerSpec) -> None:
        super().__init__(layer_spec, entmax15.ENTMAX15)
        self.factor = TokenFactor(layer_spec, width=2)

    @torch.no_grad()
    def open_start(self) -> None:
        """Begin with beta = softplus(-4) = 0.02: nearly entmax15."""
        self.factor.constant[:, 0] = -4.0

    def attend(self, inputs: Inputs) -> Result:
        inputs = inputs.as_autocast()
        call, leading = inputs.checked(_COUNTED)
        assert call.counts is not None  # requested above
        log_n = with_leading((call.counts + 1).log().expand(call.q.shape[:3]), leading)[..., None]
        beta, gamma = self.factor(inputs.query, inputs.hidden).split(1, dim=-1)
        sharpness = 1 + softplus(beta) * log_n ** (_GAMMA_RANGE * gamma.tanh())
        # In float32 at least, as the kernel computes: rounding the query again would double the error.
        query, key, value = (x.to(log_n.dtype) for x in (inputs.query, inputs.key, inputs.value))
        return inputs.rounded(super().attend(inputs.change(query=query * sharpness, key=key, value=value)))


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """entmax15 of the logits times 1 + softplus(x w + b) log(n + 1)^(2 tanh(x u + c))."""
    x = call.query @ layer.factor.weight + layer.factor.constant[:, None]
    sharpness = 1 + torch.logaddexp(x[..., :1], torch.zeros(())) * (call.count + 1).log() ** (
        2 * x[..., 1:].tanh()
    )
    return entmax15.definition(call.change(query=call.move(call.query * sharpness)), None)


family(
    "asentmax",
    ASEntmax,
    summary="entmax15 as sharp on long inputs, by a factor of log(n) that every token chooses",
    paper="Vasylenko et al. 2025, arXiv 2506.16640",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE, sparse=True, needs_length=True),
)
