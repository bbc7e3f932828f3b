"""decay: weights that fade with distance, whatever the content: what a linear recurrence forgets.

    a_ij = d^(i-j)          j <= i, not normalised

The linear RNN of Su 2023; paper: Orvieto et al., Resurrecting Recurrent Neural Networks (LRU),
arXiv 2303.06349.

Strengths: focus without limit (the sparsity measure S goes to 0 with the length) at a constant cost per
token.
Limitations: it sees neither content nor far keys, and looks back only. d is one number per head in (0, 1), as
in retention, or ``learnable``.

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
>>> _, weights = Decay(LayerSpec(1, 4), start=0.5)(q, k, v, is_causal=True, return_weights=True)
>>> weights[0, 0]
tensor([[1.0000, 0.0000, 0.0000],
        [0.5000, 1.0000, 0.0000],
        [0.2500, 0.5000, 1.0000]])
"""

import torch
from torch import Tensor

from unsoft.formula import Properties
from unsoft.mechanisms.retention import Retention, fading
from unsoft.modules.definition import Layer, WrittenCall
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec


class Decay(Retention):
    """Retention without content: every key has the feature 1."""

    def __init__(self, layer_spec: LayerSpec, start: float | None = None, *, learnable: bool = False) -> None:
        super().__init__(layer_spec, start, learnable=learnable)
        self.query_map = self.key_map = one
        self.compiled_map = None  # compiled code would multiply queries and keys


def one(x: Tensor) -> Tensor:
    """Return the feature 1 for every token."""
    return torch.ones_like(x[..., :1])


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """d^(i-j)."""
    return fading(call, layer)


family(
    "decay",
    Decay,
    summary="weights that fade with distance, whatever the content",
    argument="start",
    paper="Orvieto et al. 2023, arXiv 2303.06349",
    properties=Properties(signed=False),
)
