"""retention: linear attention whose weights fade with distance (RetNet).

    a_ij = d^(i-j) s_ij          j <= i, not normalised, signed

Paper: Sun et al., Retentive Network, arXiv 2307.08621 (d_h = 1 - 2^(-5-h)).

Strengths: focus without limit (the sparsity measure S goes to 0 with the length) at a constant cost per
token.
Limitations: it cannot look far: what is attended to depends on distance. It looks back only.

d is one number per head in (0, 1), fixed as published, or ``learnable``.

The paper's block is norm(retention) * swish(x W). Without them outputs grow with the number of keys, and more
with every layer of a deep stack: use them when training from scratch. Both are options, off by default so
that the mechanism is the bare map:

    norm="group"   mean 0 and variance 1 over the channels of a head, no weights (the paper's GroupNorm)
    norm="rms"     root mean square 1 instead, as in the authors' later code
    gate=True      swish(x W + c) for every channel; x is the hidden state if ``hidden=`` brings it,
                   otherwise the query

The c is ours: with W = 0 and c = 1.278 the gate starts at 1 (the paper has no c and a random W). Weights that
are returned are those before norm and gate.

>>> import torch
>>> from unsoft.modules.spec import LayerSpec
>>> one = torch.ones(1, 1, 3, 4)                             # every logit is 4 / sqrt 4 = 2
>>> _, weights = Retention(LayerSpec(1, 4), start=0.5)(one, one, one, is_causal=True, return_weights=True)
>>> weights[0, 0]
tensor([[2.0000, 0.0000, 0.0000],
        [1.0000, 2.0000, 0.0000],
        [0.5000, 1.0000, 2.0000]])
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from unsoft.checks import one_of
from unsoft.formula import Properties
from unsoft.modules.cache import Cache
from unsoft.modules.definition import Layer, WrittenCall, mask_factor
from unsoft.modules.linear import Linear, unchanged
from unsoft.modules.module import Inputs, Result, TokenFactor
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec

_OPEN_GATE = 1.2784645427610738
"""swish(this) = 1."""
_EPS = 1e-6


class Retention(Linear):
    """See the module's docstring. ``start``: d for all heads; by default 1 - 2^(-5-h) for head h."""

    causal_only = uses_positions = True

    def __init__(
        self,
        layer_spec: LayerSpec,
        start: float | None = None,
        *,
        learnable: bool = False,
        norm: str | None = None,
        gate: bool = False,
    ) -> None:
        super().__init__(layer_spec, unchanged, scaled=True, normaliser="none", compiled_map="identity")
        if start is not None and not 0 < start < 1:
            raise ValueError(
                f"{type(self).__name__.lower()}: the decay must lie strictly between 0 and 1, not {start!r}"
            )
        one_of("retention", "norm", norm, (None, "group", "rms"))
        heads = torch.arange(layer_spec.heads, dtype=torch.float64)
        decay = 1 - 2.0 ** (-5 - heads) if start is None else torch.full_like(heads, start)
        # As logit(d), which keeps a learned d inside (0, 1); the published values need float64 to be exact.
        self.logit = nn.Parameter(torch.logit(decay).float(), requires_grad=learnable)
        self.norm = norm
        self.gate = TokenFactor(layer_spec, width=layer_spec.values, start=_OPEN_GATE) if gate else None

    def attend(self, inputs: Inputs) -> Result:
        return self._finished(inputs, super().attend(inputs))

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        return self._finished(inputs, super().attend_cached(inputs, cache))

    def _finished(self, inputs: Inputs, result: Result) -> Result:
        out = result[0] if isinstance(result, tuple) else result
        if self.norm == "group":
            out = functional.layer_norm(out, out.shape[-1:], eps=_EPS)
        elif self.norm == "rms":
            out = functional.rms_norm(out, out.shape[-1:], eps=_EPS)
        if self.gate is not None:
            gate = functional.silu(self.gate(inputs.query, inputs.hidden))
            out = (out * gate).to(torch.promote_types(out.dtype, inputs.query.dtype))
        return (out, result[1]) if isinstance(result, tuple) else out

    def decay(self) -> Tensor:
        return self.logit.sigmoid()


def fading(call: WrittenCall, layer: Layer) -> Tensor:
    """Return d^(i-j), for the definitions of retention and decay."""
    distance = (call.rows[:, None] - call.keys).clamp(min=0)
    d: Tensor = layer.logit.to(call.query.dtype).sigmoid()[:, None, None]
    return d**distance * mask_factor(call)


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """d^(i-j) s, not normalised (Sun et al. 2023)."""
    return fading(call, layer) * call.logits


family(
    "retention",
    Retention,
    summary="linear attention whose weights fade with distance",
    argument="start",
    paper="Sun et al. 2023, arXiv 2307.08621",
    properties=Properties(signed=True),
)
