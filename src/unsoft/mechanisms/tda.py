"""tda: the difference of two maps of squared cosines above a threshold that rises with the length.

    A = max(q̂1.k̂1 - t, 0)^2 - l max(q̂2.k̂2 - t, 0)^2          t = beta sqrt(2 log(n) / D)

with q̂, k̂ of length 1, n the number of keys that a row sees (i + 1 in a causal row) and l in [0, 1].

Paper: Huang et al., Threshold Differential Attention for Sink-Free, Ultra-Sparse, and Non-Dispersive Language
Modeling, arXiv 2601.12145 (ACL 2026); the authors' code is snap-research/TDA.

The threshold is what the largest of n cosines of random vectors of width D reaches, so a key that has nothing
to do with the query gets the weight 0, however many there are.

Strengths: it is exactly 0 for almost all keys, can attend to nothing, and subtracts.
Limitations: it ignores the length of queries and keys and the scale of the logits, and its rows are not
normalised: the output fades where few keys pass. A float mask is added to the cosine. Heads come in pairs, as
in ``differential``. beta and l are learned, one for each pair; l starts at 0.5 and is clamped to [0, 1]; beta
starts at 1, and lower for heads narrower than 32, where no cosine would pass.

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> torch.manual_seed(0)
<torch._C.Generator object at ...>
>>> q, k, v = (torch.randn(1, 2, 500, 64) for _ in range(3))
>>> _, weights = TDA(LayerSpec(heads=2, head_dim=64))(q, k, v, is_causal=True, return_weights=True)
>>> round(float((weights == 0).double().mean()), 2)                       # half of them are in the future
1.0
"""

import math

import torch
from torch import Tensor, nn

from unsoft.engines.arguments import check_tensors
from unsoft.engines.call import compute_dtype
from unsoft.formula import Facts, Formula, Properties
from unsoft.mechanisms.differential import halves
from unsoft.modules.definition import Layer, WrittenCall, over, visible_part
from unsoft.modules.head_pairs import check_pairs, difference_of_maps, joined, split
from unsoft.modules.module import Inputs, Mechanism, Result
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec

THRESHOLDED = Formula(
    weight="max(s - t*sqrt(log(n)), 0)**2", params={"t": 0.0}, bias="logit", facts=Facts(signed=False)
)


class TDA(Mechanism):
    """See the module's docstring."""

    takes_window = packs_documents = True

    formula_names = ("base",)
    key_head_multiple = 2

    def __init__(self, layer_spec: LayerSpec, *, beta: float | None = None, strength: float = 0.5) -> None:
        super().__init__(layer_spec)
        check_pairs("tda", layer_spec)
        self.base = THRESHOLDED
        if beta is None:  # a threshold of at most 0.6 in rows of 512 keys
            beta = min(1.0, 0.6 * math.sqrt(layer_spec.head_dim / (2 * math.log(512))))
        self.beta = nn.Parameter(torch.full((layer_spec.heads // 2,), float(beta)))
        self.strength = nn.Parameter(torch.full((layer_spec.heads // 2,), float(strength)))

    def attend(self, inputs: Inputs) -> Result:
        inputs = inputs.as_autocast()
        check_tensors(inputs.query, inputs.key, inputs.value)  # before they all become wide
        wide = compute_dtype(inputs.query.dtype)  # squares of small differences: rounded once, at the end
        threshold = self.beta * (2 / self.layer_spec.head_dim) ** 0.5
        cosines = inputs.change(
            query=direction(inputs.query.to(wide)),
            key=direction(inputs.key.to(wide)),
            value=joined(inputs.value.to(wide)),
        )
        strength = self.strength.clamp(0, 1)[:, None, None].to(wide)
        maps = difference_of_maps(cosines.with_options(scale=1.0), self.base, strength, {"t": threshold})
        out, *weights = (x.to(inputs.query.dtype) for x in maps)
        return (split(out), weights[0].repeat_interleave(2, dim=-3)) if weights else split(out)


def direction(x: Tensor) -> Tensor:
    """Return x / |x|; the direction of 0 is 0, with gradient 0. Numbers below the smallest normal one count
    as 0: their gradient, about 1 / |x|, overflows.

    >>> direction(torch.tensor([[3e-30, 4e-30], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    largest = x.detach().abs().amax(-1, keepdim=True)  # so that no square underflows
    zero = largest < torch.finfo(x.dtype).tiny
    x = torch.where(zero, 1.0, x / torch.where(zero, 1.0, largest))
    return torch.where(zero, 0.0, x / x.square().sum(-1, keepdim=True).sqrt())


def definition(call: WrittenCall, layer: Layer) -> tuple[Tensor, Tensor]:
    """relu(cos1 - t)^2 - l relu(cos2 - t)^2 on the joined values of each pair (Huang et al. 2026)."""
    maps = []
    for half in halves(call):
        query, key = half.query, half.spread(half.key)
        cosine = over(query @ key.mT, query.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :])
        t = layer.beta[:, None, None] * (2 * half.count.log() / query.shape[-1]).sqrt()
        maps.append(visible_part((cosine + half.bias - t).relu().square(), half.visible))
    weights = maps[0] - layer.strength.clamp(0, 1)[:, None, None] * maps[1]
    both = torch.cat([call.value[:, 0::2], call.value[:, 1::2]], dim=-1)
    out = weights @ both.repeat_interleave(weights.shape[1] // both.shape[1], dim=1)
    first, second = out.chunk(2, dim=-1)
    return weights.repeat_interleave(2, dim=1), torch.stack([first, second], dim=2).flatten(1, 2)


family(
    "tda",
    TDA,
    summary="difference of two sparse maps: squared cosines above a threshold",
    paper="Huang et al. 2026, arXiv 2601.12145",
    properties=Properties(signed=True, sparse=True, needs_length=True),
)
