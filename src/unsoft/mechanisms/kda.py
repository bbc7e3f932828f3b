"""kda: Kimi delta attention, the delta rule on a state whose every channel fades by itself.

    S_t = D_t S_(t-1) + b_t k_t (v_t - (D_t S_(t-1))^T k_t)^T      D_t = diag(a_t)      o_t = S_t^T q_t

Paper: Kimi Team, Kimi Linear, arXiv 2510.26692 (2025).

Strengths: those of gated-deltanet, and some channels of the keys can be kept for long while others fade; the
cache is the state.
Limitations: it holds at most as many exact pairs as keys have channels, and looks back only. It uses smaller
chunks, hence more time than gated-deltanet.

As published b_t = sigmoid(x_t W + c) and a_t = exp(-A softplus(x_t W' + c')), a number for every channel,
here with a full W' in place of one of low rank; x is the hidden state if ``hidden=`` brings it, otherwise
the key. log a_t is at least -5 (the authors' kernels have this as an option): a channel keeps 0.7 % at
least. The start is that of gated-deltanet.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("kda", heads=2, head_dim=8)
>>> layer(*(torch.randn(1, 2, 100, 8) for _ in range(3)), is_causal=True).shape
torch.Size([1, 2, 100, 8])
"""

from torch import Tensor

from unsoft.engines.linear.delta import LOWEST
from unsoft.formula import Properties
from unsoft.mechanisms import gated_deltanet
from unsoft.mechanisms.gated_deltanet import GatedDeltaNet
from unsoft.modules.definition import Layer, WrittenCall
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec


class KimiDelta(GatedDeltaNet):
    """See the module's docstring."""

    def __init__(self, layer_spec: LayerSpec) -> None:
        self.channels = layer_spec.head_dim
        super().__init__(layer_spec)

    def gates(self, key: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        correct, keep = super().gates(key, hidden)
        return correct, None if keep is None else keep.clamp(min=LOWEST)


def definition(call: WrittenCall, layer: Layer) -> tuple[Tensor, Tensor]:
    """The recurrence of the paper (Kimi Team 2025): that of gated-deltanet, a number for every channel."""
    return gated_deltanet.definition(call, layer, lowest=-5.0)


family(
    "kda",
    KimiDelta,
    summary="the delta rule on a state whose every channel fades by itself",
    paper="Kimi Team 2025, arXiv 2510.26692",
    properties=Properties(signed=True),
)
