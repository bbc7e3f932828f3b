"""gau: the gated attention unit: squared-ReLU attention over activated values, times a gate per channel.

    y = SiLU(x W + c) * attention(q, k, SiLU(v))          attention: relu2, that is relu(s)^2 / n

Paper: Hua et al., Transformer Quality in Linear Time, arXiv 2202.10447. Su later chose softmax in its place
(GAU-alpha, 2022), which is ``gau+softmax``; every mechanism can follow "gau+". x is the hidden state if
``hidden=`` brings it, otherwise the query.

The gate and the activated values are the paper's; queries and keys are those of the layer. In the paper
both come from one projection of width 128, shared by a single head, with a scale and an offset per channel,
and a layer replaces attention and MLP together. Ours besides: W begins at 0 and c where SiLU(c) = 1.
``activated_values=False`` leaves v as it is, for layers that were trained so.

Strengths: the gate acts on channels, not on whole heads, and with SiLU it can amplify and change signs, so
one head does the work of many.
Limitations: weights alone do not explain the output: those returned are before the gate, for SiLU(v). relu2
is not normalised; its row sum grows with the square of the logits.

>>> import torch
>>> from unsoft.modules.build import mechanism
>>> layer = mechanism("gau", heads=1, head_dim=2)
>>> q, k, v = torch.ones(1, 1, 1, 2), torch.eye(2)[None, None], torch.eye(2)[None, None]
>>> layer(q, k, v, scale=1.0)                       # 1/2 of SiLU(1) = 0.7311 from each key, times a gate of 1
tensor([[[[0.3655, 0.3655]]]], grad_fn=<MulBackward0>)
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from unsoft.formula import Properties
from unsoft.mechanisms.gated import Gated
from unsoft.modules.cache import Cache
from unsoft.modules.definition import Definition, Layer, WrittenCall
from unsoft.modules.module import Inputs, Mechanism, Result
from unsoft.modules.pointwise import Pointwise
from unsoft.modules.registry import family, modifier

_SILU_IS_ONE = 1.2784645427610738
"""The root of SiLU(c) = 1: the gate begins at 1."""


class Gau(Gated):
    """See the module's docstring."""

    uses_hidden = True
    prepares_steps = False
    """Others may append values to a cache only if it holds them as they are."""

    def __init__(self, inner: Mechanism, *, activated_values: bool = True) -> None:
        super().__init__(inner, elementwise=True, start=_SILU_IS_ONE)
        self.activated_values = activated_values

    def activation(self, x: Tensor) -> Tensor:
        return silu(x)

    def attend(self, inputs: Inputs) -> Result:
        return super().attend(self._activated(inputs))

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        return super().attend_cached(self._activated(inputs), cache)

    def _activated(self, inputs: Inputs) -> Inputs:
        return inputs.change(value=silu(inputs.value)) if self.activated_values else inputs


def definition(inner: Definition) -> Definition:
    """SiLU(q W + c) times the output for the values SiLU(v) (Hua et al. 2022)."""

    def gau(call: WrittenCall, layer: Layer) -> tuple[Tensor, Tensor]:
        query = call.query[:, :: call.query.shape[1] // layer.layer_spec.heads]
        x = query @ layer.factor.weight + layer.factor.constant[:, None]
        value = call.value * call.value.sigmoid() if layer.activated_values else call.value
        weights, out = inner(call.change(value=value), layer.inner)
        return weights, x * torch.sigmoid(x) * out

    return gau


_SUMMARY = "gated attention unit: a SiLU gate for every channel, and SiLU of the values"
family(
    "gau",
    lambda layer_spec, base, **options: Gau(Pointwise(base, layer_spec), **options),
    summary=_SUMMARY,
    paper="Hua et al. 2022, arXiv 2202.10447",
    properties=Properties(signed=False, sparse=True, needs_length=True),
    base="relu2",
    takes=Gau,
)
modifier("gau", Gau, summary=_SUMMARY)
