"""differential: the difference of two softmax maps with their own keys,
normalised per head (Differential Transformer, v1).

    A = softmax(q1 k1) - l softmax(q2 k2)          out = (1 - l0) RMSNorm(A v)
    l = exp(a1 . b1) - exp(a2 . b2) + l0           l0 = 0.8 - 0.6 exp(-0.3 layer)

Paper: Ye et al., Differential Transformer, arXiv 2410.05258 (ICLR 2025).

Heads come in pairs: query and key heads 2p and 2p + 1 are the two maps of pair p, and the values of both are
joined, as in the paper (half as many heads, values twice as wide); so shapes are those of ordinary attention.
Under grouped-query attention query pair p reads key pair p // group, which the authors' plain file gets
wrong.

Strengths: it cancels what both maps agree on (noise, sinks). Rows sum to 1 - l before the norm; the norm then
fixes the scale.
Limitations: nothing keeps l positive, as published; if it is negative, the maps add.

The weights returned are A times the scale of its row, so weights times values are the output up to the
learned gain of the norm (1 at the start).

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> layer = Differential(LayerSpec(heads=2, head_dim=4))
>>> layer(*(torch.randn(1, 2, 5, 4) for _ in range(3))).shape
torch.Size([1, 2, 5, 4])
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from unsoft.engines.call import compute_dtype
from unsoft.formula import Formula, Properties
from unsoft.modules.cache import Cache
from unsoft.modules.definition import Layer, Pointwise, WrittenCall, logits_of, visible_part
from unsoft.modules.head_pairs import JoinedValueCache, check_pairs, difference_of_maps, joined, split
from unsoft.modules.module import Derived, Inputs, Mechanism, Result
from unsoft.modules.registry import family, resolve_formula
from unsoft.modules.spec import LayerSpec

_EPS = 1e-5
"""Of RMSNorm, as published: it keeps the gradient of a row of zeros finite."""


def first_lambda(layer: int) -> float:
    """Return l0 of a layer, counted from 0.

    >>> first_lambda(0), round(first_lambda(30), 3)
    (0.2, 0.8)
    """
    return round(0.8 - 0.6 * math.exp(-0.3 * layer), 12)


class Differential(Mechanism):
    """See the module's docstring."""

    takes_window = packs_documents = True

    formula_names = ("base",)
    prepares_steps = True
    key_head_multiple = 2

    def __init__(self, layer_spec: LayerSpec, base: Formula | None = None) -> None:
        super().__init__(layer_spec)
        check_pairs("differential", layer_spec)
        self.base = base or resolve_formula("softmax")
        self.first = first_lambda(layer_spec.layer)
        self.vectors = nn.Parameter(0.1 * torch.randn(4, layer_spec.head_dim))  # a1, b1, a2, b2
        self.gain = nn.Parameter(torch.ones(2 * layer_spec.values))
        self._known_factors = Derived()

    def strength(self) -> Tensor:
        """Return l, a single number, computed in float32 at least."""
        a1, b1, a2, b2 = self.vectors if self.vectors.dtype == torch.float64 else self.vectors.float()
        strength: Tensor = (a1 @ b1).exp() - (a2 @ b2).exp() + self.first
        return strength

    def new_cache(self, batch: int) -> Cache:
        return JoinedValueCache(batch)

    def prepared_step(self, inputs: Inputs, cache: Cache) -> Tensor | None:
        dtype = inputs.query.dtype
        # float32 at least: the norm below does not widen, as that of half precision has to.
        if torch.is_grad_enabled() or type(cache) is not JoinedValueCache or compute_dtype(dtype) != dtype:
            return None
        maps = cache.step_by_pairs(self.base, inputs)
        if maps is None:
            return None
        strength, gain = self._known_factors.get(
            lambda: (self.strength().item(), (1 - self.first) * self.gain.to(dtype)),
            dtype,
            self.vectors,
            self.gain,
        )
        out = torch.sub(*maps, alpha=strength)
        return split(rms_norm(out, gain.shape, gain, _EPS))

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        return self._attend(self.with_cached_tokens(inputs, cache))

    def attend(self, inputs: Inputs) -> Result:
        return self._attend(inputs.change(value=joined(inputs.value)))

    def _attend(self, inputs: Inputs) -> Result:
        """Attend to values that are joined already."""
        inputs = inputs.as_autocast()
        dtype = inputs.query.dtype
        out, *weights = difference_of_maps(inputs, self.base, self.strength())
        scale = (1 - self.first) * (out.square().mean(-1, keepdim=True) + _EPS).rsqrt()
        out = split(out * scale * self.gain.to(out.dtype)).to(dtype)
        return (out, (weights[0] * scale).repeat_interleave(2, dim=-3).to(dtype)) if weights else out


def halves(call: WrittenCall) -> list[WrittenCall]:
    """Return the call of the first and that of the second head of each pair."""
    parts = ("query", "key", "visible", "bias")
    return [call.change(**{part: getattr(call, part)[:, which::2] for part in parts}) for which in (0, 1)]


def definition(call: WrittenCall, layer: Layer, formula: Pointwise) -> tuple[Tensor, Tensor]:
    """(A1 - l A2) v for each pair of heads, then RMSNorm and 1 - l0 (Ye et al. 2024): weights and output."""
    maps = [visible_part(formula(logits_of(half)), half.visible) for half in halves(call)]
    a1, b1, a2, b2 = layer.vectors
    strength = (a1 * b1).sum().exp() - (a2 * b2).sum().exp() + layer.first
    weights = maps[0] - strength * maps[1]
    joined = torch.cat([call.value[:, 0::2], call.value[:, 1::2]], dim=-1)
    out = weights @ joined.repeat_interleave(weights.shape[1] // joined.shape[1], dim=1)
    scale = (1 - layer.first) * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    first, second = (out * scale * layer.gain).chunk(2, dim=-1)
    return (weights * scale).repeat_interleave(2, dim=1), torch.stack([first, second], dim=2).flatten(1, 2)


family(
    "differential",
    Differential,
    summary="difference of two softmax maps, normalised per head",
    paper="Ye et al. 2024, arXiv 2410.05258",
    properties=Properties(signed=True),
    base="softmax",
)
