"""gated: an output gate on any mechanism, the control for every claim about row sums other than 1.

    y = sigmoid(x W + c) * attention(q, k, v)          one gate per token and head, or per channel too

Paper: Qiu et al., Gated Attention for Large Language Models, arXiv 2505.06708.

Strengths: it switches a head off for a token, which removes the attention sink and lets plain softmax attend
to nothing.
Limitations: it cannot subtract one key from another. x is the hidden state if ``hidden=`` is passed,
otherwise the query. Initially W = 0 and c = 4, so the gate is 0.98: almost open.

The weights returned include the gate of the head. With ``elementwise=True`` (a gate for every channel) no
matrix of weights can, and weights times values are the output before the gate.
"""

from torch import Tensor

from unsoft.modules.cache import Cache
from unsoft.modules.definition import Definition, Layer, WrittenCall
from unsoft.modules.module import Inputs, Mechanism, Result, TokenFactor, Wrapper
from unsoft.modules.registry import modifier

_ALMOST_OPEN = 4.0


class Gated(Wrapper):
    """See the module's docstring."""

    def __init__(self, inner: Mechanism, *, elementwise: bool = False, start: float = _ALMOST_OPEN) -> None:
        super().__init__(inner)
        self.takes_window, self.packs_documents = inner.takes_window, inner.packs_documents
        self.elementwise = elementwise
        self.factor = TokenFactor(
            inner.layer_spec, width=inner.layer_spec.values if elementwise else 1, start=start
        )

    @property
    def prepares_steps(self) -> bool:
        return self.inner.prepares_steps

    def attend(self, inputs: Inputs) -> Result:
        return self._gate(inputs, self.inner.attend(inputs.change(wide=True)))

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        return self._gate(inputs, self.inner.decode(inputs.change(wide=True), cache))

    def activation(self, x: Tensor) -> Tensor:
        """Return the gate for x W + c."""
        return x.sigmoid()

    def _gate(self, inputs: Inputs, result: Result) -> Result:
        every = self.inner.query_heads // self.layer_spec.heads
        gate = self.activation(self.factor(inputs.query[..., ::every, :, :], inputs.hidden))
        if not isinstance(result, tuple):
            return inputs.rounded(gate * result)
        weights = result[1] if self.elementwise else gate * result[1]
        return inputs.rounded(gate * result[0]), inputs.rounded(weights)


def definition(inner: Definition) -> Definition:
    """Weights and output times sigmoid(q W + c), (B, heads, R, 1) (Qiu et al. 2025)."""

    def gated(call: WrittenCall, layer: Layer) -> tuple[Tensor, Tensor]:
        query = call.query[:, :: call.query.shape[1] // layer.layer_spec.heads]
        factor = (query @ layer.factor.weight + layer.factor.constant[:, None]).sigmoid()
        weights, out = inner(call, layer.inner)
        return factor * weights, factor * out

    return gated


modifier("gated", Gated, summary="a learned output gate per token and head")
