"""gated-deltanet: the delta rule on a state that fades as much as each token says.

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T      o_t = S_t^T q_t      |k_t| = |q_t| = 1

Paper: Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv 2412.06464 (ICLR 2025).

Strengths: it replaces the value of a key that comes again, and can drop everything at once (a near 0), at a
cost per token that does not grow; the cache is the state.
Limitations: it holds at most as many exact pairs as keys have channels, and looks back only.

As published b_t = sigmoid(x_t W + c) and a_t = exp(-A softplus(x_t W' + c')), one number per head; x is the
hidden state if ``hidden=`` brings it, otherwise the key. b starts at 1/2. A starts at numbers from 1 to 16
over the heads (published: drawn from there) and softplus(c') at 0.01, so that heads remember from 6 to 100
tokens.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("gated-deltanet", heads=2, head_dim=8)
>>> layer(*(torch.randn(1, 2, 100, 8) for _ in range(3)), is_causal=True).shape
torch.Size([1, 2, 100, 8])
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from unsoft.formula import Properties
from unsoft.mechanisms.deltanet import from_keys, recurrence
from unsoft.modules.definition import Layer, WrittenCall
from unsoft.modules.delta import Delta
from unsoft.modules.module import TokenFactor
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec

RATE = math.log(math.expm1(0.01))
"""softplus(this) = 0.01."""


def first_strengths(heads: int) -> Tensor:
    """Return the initial log A of every head.

    >>> first_strengths(4).exp().round()
    tensor([ 1.,  6., 11., 16.])
    """
    return torch.linspace(1.0, 16.0, heads).log()


class GatedDeltaNet(Delta):
    """See the module's docstring."""

    channels = 1
    """Numbers per head that the state fades by."""

    def __init__(self, layer_spec: LayerSpec) -> None:
        super().__init__(layer_spec)
        self.correction = TokenFactor(layer_spec, width=1)
        self.fading = TokenFactor(layer_spec, width=self.channels, start=RATE)
        self.strength = nn.Parameter(first_strengths(layer_spec.heads))

    def gates(self, key: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        correct = self.correction(key, hidden)[..., 0].sigmoid()
        strength = self.strength.to(key.dtype).exp()[:, None, None]
        return correct, -strength * softplus(self.fading(key, hidden))


def definition(call: WrittenCall, layer: Layer, lowest: float = -math.inf) -> tuple[Tensor, Tensor]:
    """The recurrence of the paper (Yang et al. 2024); log a_t is at least ``lowest``."""
    correct = from_keys(call, layer.correction)[..., 0].sigmoid()
    rate = (1 + from_keys(call, layer.fading).exp()).log()
    faded = (-layer.strength.exp()[:, None, None] * rate).clamp(min=lowest)
    return recurrence(call, correct, faded.exp())


family(
    "gated-deltanet",
    GatedDeltaNet,
    summary="the delta rule on a state that fades as each token says",
    paper="Yang et al. 2024, arXiv 2412.06464",
    properties=Properties(signed=True),
)
