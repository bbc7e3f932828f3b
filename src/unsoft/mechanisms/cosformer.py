"""cosformer: linear attention with rectified features and a cosine that prefers near keys.

    a_ij  proportional to  relu(q_i) . relu(k_j) cos(pi/2 (i - j) / M)

Paper: Qin et al., cosFormer: Rethinking Softmax in Attention, arXiv 2202.08791 (ICLR 2022). It argues for
non-negative weights: the counter-view to signed attention.

Strengths: it concentrates locally at linear cost; weights are non-negative and sum to 1.
Limitations: it cannot distinguish distances beyond M.

M is fixed (``max_length``, in brackets by name: "cosformer(2048)"), not the length of the input as in the
authors' code, where one and the same prefix gives different outputs as the sequence grows. The cosine matters
for sequences of about M: at L = M it moves 20 % of the weight of the last row, at L = M/2 4 %, at L = M/8 0.2
%, and a much larger M makes this linear-relu. Give the length that you work with. The default is 256;
:func:`unsoft.hf.swap` takes the length of the model (``max_position_embeddings``).

Beyond M (the paper has nothing to say there, and the cosine would turn negative) positions run back and forth
between 0 and M: position p stands at M - |p mod 2M - M|. Nothing changes up to M, no weight turns negative,
decoding never stops, a row still sees only the past, and neighbours stay neighbours; but a key 2M back looks
as near as the last one.

A row whose features all vanish outputs exact zeros (the authors divide by 1e-6 instead). As published: no
1/sqrt(d); ``scale=`` has no effect, it would cancel.

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> layer = Cosformer(LayerSpec(heads=2, head_dim=4), max_length=16)
>>> q, k, v = (torch.rand(1, 2, 6, 4) for _ in range(3))
>>> _, weights = layer(q, k, v, is_causal=True, return_weights=True)
>>> torch.allclose(weights.sum(-1), torch.ones(1, 2, 6)), bool((weights >= 0).all())
(True, True)
"""

import math
from functools import partial

import torch
from torch import Tensor

from unsoft.checks import whole_number
from unsoft.formula import ONE, Properties
from unsoft.modules.definition import Layer, WrittenCall, over_sum
from unsoft.modules.linear import Linear
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec


class Cosformer(Linear):
    """See the module's docstring; ``max_length`` is M."""

    uses_positions = True

    def __init__(self, layer_spec: LayerSpec, max_length: int | None = None) -> None:
        if max_length is None:
            max_length = layer_spec.positions or 256
        self.max_length = limit = whole_number("cosformer", "max_length", max_length)
        turned = partial(turn, limit=limit)
        super().__init__(layer_spec, turned, positional=True, compiled_map="cosine", position_limit=limit)


def turn(x: Tensor, positions: Tensor, limit: int) -> Tensor:
    """Return [relu(x) cos, relu(x) sin] of the position: dot products of two such features contain the cosine
    of the difference."""
    x = x.relu()
    folded = limit - (positions % (2 * limit) - limit).abs()
    angle = folded.to(x.dtype)[:, None, :, None] * (math.pi / 2 / limit)
    return torch.cat([x * angle.cos(), x * angle.sin()], dim=-1)


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """relu(q) . relu(k) cos(pi/2 (i - j) / M), over its sum (Qin et al. 2022);
    beyond M positions go back and forth."""
    period = 2 * layer.max_length
    rows, keys = (torch.minimum(p % period, period - p % period) for p in (call.rows, call.keys))
    near = torch.cos(math.pi / 2 * (rows[:, None] - keys) / layer.max_length)
    return over_sum(call, call.move(call.query.relu() @ call.spread(call.key).relu().mT * near))


family(
    "cosformer",
    Cosformer,
    summary="linear attention, rectified features, near keys preferred by a cosine",
    paper="Qin et al. 2022, arXiv 2202.08791",
    argument="max_length",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE, sparse=True),
)
