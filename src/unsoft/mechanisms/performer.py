"""performer(m): linear attention with m positive random features, which approaches softmax as m grows.

    exp(q . k) = E_w[ exp(w.q - |q|^2/2) exp(w.k - |k|^2/2) ],  w Gaussian; m directions, orthogonal in groups

Paper: Choromanski et al., Rethinking Attention with Performers, arXiv 2009.14794.

Strengths: it approaches softmax as m grows, at linear cost, and shows that linear attention needs dimension
to focus.
Limitations: sharp attention is expensive; the number of features needed grows exponentially with the size of
the logits. The directions are drawn once from ``seed`` and are not trained. Features are summed by their
logarithms, each with its largest value so far taken out, so that rows sum to 1 for every head width and every
size of queries and keys (the authors subtract one maximum over all tokens and add 1e-4 to every feature
instead, which looks ahead and is not causal).

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> q, k, v = (torch.randn(1, 1, 50, 8, generator=torch.Generator().manual_seed(s)) / 2 for s in range(3))
>>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
>>> errors = [(Performer(LayerSpec(1, 8), m)(q, k, v) - exact).norm().item() for m in (8, 128, 2048)]
>>> errors[0] > errors[1] > errors[2]
True
"""

from functools import partial

import torch
from torch import Tensor

from unsoft.checks import whole_number
from unsoft.formula import ONE, Properties
from unsoft.modules.definition import Layer, WrittenCall, scaled, shares_of_sums
from unsoft.modules.linear import Linear
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec


def orthogonal_directions(count: int, width: int, seed: int) -> Tensor:
    """Return ``count`` random directions, orthogonal in groups of ``width``, with the lengths of Gaussian
    vectors."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    blocks = []
    for _ in range(-(-count // width)):
        orthogonal, triangle = torch.linalg.qr(draw(width, width))
        # QR prefers some signs, which would bias the estimate.
        blocks.append(orthogonal * triangle.diagonal().sign() * draw(width, width).norm(dim=1)[:, None])
    return torch.cat(blocks)[:count].float()


class Performer(Linear):
    """See the module's docstring; ``count`` is m."""

    directions: Tensor

    def __init__(self, layer_spec: LayerSpec, count: int = 256, *, seed: int = 0) -> None:
        whole_number("performer", "count", count)
        super().__init__(layer_spec, self._query_map, self._key_map, scaled=True, logarithmic=True)
        self.register_buffer("directions", orthogonal_directions(count, layer_spec.head_dim, seed))

    def _query_map(self, x: Tensor) -> Tensor:
        return x @ self.directions.to(x.dtype).mT  # exp(-|q|^2 / 2) is the same for the whole row and cancels

    def _key_map(self, x: Tensor) -> Tensor:
        """Return w . x - |x|^2 / 2 for random directions w: logarithms of unbiased features of exp(s)
        (Performer, arXiv 2009.14794)."""
        return self._query_map(x) - x.square().sum(-1, keepdim=True) / 2


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """Features exp(w . x - |x|^2 / 2) for the layer's directions w (Choromanski et al. 2020).

    A query's |x|^2 / 2 is left out: it cancels in its row.
    """
    directions = layer.directions.to(call.query.dtype)
    query, key = scaled(call)
    lengths = call.move(key.square().sum(-1, keepdim=True)) / 2
    return shares_of_sums(call, call.move(query @ directions.mT), call.move(key @ directions.mT) - lengths)


family(
    "performer",
    Performer,
    summary="random features that approach softmax as their number grows",
    paper="Choromanski et al. 2020, arXiv 2009.14794",
    argument="count",
    properties=Properties(signed=False, row_sum=ONE, l1=ONE),
)
