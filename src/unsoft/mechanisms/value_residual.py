"""value-residual: every layer attends to a mixture of its own values and those of the first layer.

    v' = l1 v_first + l2 v          l1, l2: two numbers per layer, learned

Paper: Zhou et al., Value Residual Learning, arXiv 2410.17897 (ResFormer, ACL 2025). Both start at 1/2; in a
trained model (``init="open"``) at 0 and 1, where nothing changes.

Strengths: it passes the first layer's values of a token to every depth, around any mechanism:
``value-residual+cog``. The first layer itself is unchanged.
Limitations: it does not work in a single layer. ``unsoft.hf.swap`` and the models of ``unsoft train`` pass
the first layer's values on; elsewhere pass ``first_value=``. It needs values of one shape in all layers, and
does not support gradient checkpointing. The weights are those of the mechanism inside, and belong to the
mixture.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("value-residual+softmax", heads=1, head_dim=4, layer=3)
>>> x, first = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
>>> mixed = unsoft.attention(x, x, (x + first) / 2, is_causal=True)
>>> torch.allclose(layer(x, x, x, is_causal=True, first_value=first), mixed, atol=1e-6)
True
"""

import torch
from torch import Tensor, nn

from unsoft.modules.cache import Cache
from unsoft.modules.definition import Definition, NotDefined, WrittenCall
from unsoft.modules.module import Inputs, Mechanism, Result, Wrapper
from unsoft.modules.registry import modifier


class ValueResidual(Wrapper):
    """See the module's docstring."""

    def __init__(self, inner: Mechanism) -> None:
        super().__init__(inner)
        self.takes_window, self.packs_documents = inner.takes_window, inner.packs_documents
        self.needs_first_value = inner.layer_spec.layer > 0
        self.shares = nn.Parameter(torch.tensor([0.5, 0.5])) if self.needs_first_value else None
        """Of the first layer's values and of the own."""

    @torch.no_grad()
    def open_start(self) -> None:
        """Use the layer's own values only."""
        if self.shares is not None:
            self.shares.copy_(torch.tensor([0.0, 1.0]))

    def attend(self, inputs: Inputs) -> Result:
        return self.inner.attend(self._mixed(inputs))

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        return self.inner.decode(self._mixed(inputs), cache)

    def _mixed(self, inputs: Inputs) -> Inputs:
        if self.shares is None:
            return inputs
        first, value = inputs.first_value, inputs.value
        if first is None or first.shape != value.shape:
            given = "is missing" if first is None else f"has shape {tuple(first.shape)}"
            raise ValueError(
                f"argument 'first_value' {given}; layer {self.layer_spec.layer} of value-residual adds the"
                f" values of the first layer, of shape {tuple(value.shape)}"
            )
        by_first, by_own = self.shares.to(value.dtype)
        return inputs.change(value=by_first * first + by_own * value)


def definition(inner: Definition) -> Definition:
    """The first layer is unchanged; the values that other layers add are not part of a call."""

    def residual(call: WrittenCall, layer: ValueResidual) -> tuple[Tensor, Tensor]:
        if layer.shares is not None:
            raise NotDefined("the values of the first layer are not part of the call")
        return inner(call, layer.inner)

    return residual


modifier("value-residual", ValueResidual, summary="values are mixed with those of the first layer")
