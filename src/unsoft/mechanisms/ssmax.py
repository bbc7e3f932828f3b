"""ssmax: softmax whose sharpness grows with the logarithm of the number of keys, by a learned factor.

    a_j = n^(a s_j) / sum_k n^(a s_k) = softmax_j( a log(n) s_j )          n: the keys that the row sees

Paper: Nakanishi, Scalable-Softmax Is Superior for Attention, arXiv 2501.19399. The learned form of ``logn``,
with no bias, as the paper recommends for long inputs. a starts at 0.43, the paper's fixed value.

Strengths: the largest weight of a long row does not fade, as softmax's does; sharpness is learned per head.
Limitations: it cannot subtract, attend to nothing or give an exact zero. A row that sees one key has logit 0.
In a pretrained model start it where it does what softmax does at the lengths of its training: a = 1 /
log(n0); ``swap`` uses n0 = 512. A float mask is added after the factor.

>>> import math, torch
>>> SSMAX.row(torch.tensor([1.0, 0.0]), a=math.log(3) / math.log(2))            # 2^a = 3, against 1
tensor([0.7500, 0.2500])
"""

import math

import torch
from torch import Tensor

from unsoft.formula import Facts, Formula
from unsoft.modules.definition import Layer, WrittenCall, shares
from unsoft.modules.pointwise import Pointwise
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec

SSMAX = Formula(
    weight="exp(a*log(n)*s - m)",
    mass="exp(a*log(n)*s - m)",
    peak="a*log(n)*s",
    params={"a": 0.43},
    bias="a*log(n)*s",
    name="ssmax",
    facts=Facts(signed=False),
)
_USUAL_LENGTH = 512


class SSMax(Pointwise):
    """See the module's docstring."""

    def __init__(self, layer_spec: LayerSpec, base: Formula | None = None) -> None:
        super().__init__(base or SSMAX, layer_spec)

    @torch.no_grad()
    def open_start(self) -> None:
        """Start as softmax for rows of 512 keys."""
        super().open_start()
        self.values["a"].fill_(1 / math.log(_USUAL_LENGTH))


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """n^(a s) over its sum (Nakanishi 2025)."""
    factor = layer.values["a"][:, None, None] * call.count.log()
    return shares(factor * call.logits + call.bias, call.visible)


family(
    "ssmax",
    SSMax,
    summary="softmax as sharp on long inputs, by a learned factor of log(n)",
    paper="Nakanishi 2025, arXiv 2501.19399",
    properties=SSMAX.properties,
    base=SSMAX,
)
