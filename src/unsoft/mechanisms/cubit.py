"""cubit: softmax attention over values from a kernel ridge regression between the tokens.

    y = A (K + l I)^-1 S v          A = softmax(q k),   K = softmax(g r u),   u = r / |r|,   S in (0.5, 2)

Paper: Zheng et al., Cubit: Token Mixer with Kernel Ridge Regression, arXiv 2605.06501. Attention is a
regression by local means (Nadaraya-Watson); the inverse of the kernel matrix of the tokens makes it kernel
ridge regression. We could not read the paper beyond its first section: this follows the reproduction of its
equation 13 and appendix H in InternLM's archspace (olmo_cubit), and equals the reference function of its
tests. There, K is a causal softmax and not the symmetric kernel of textbooks, so the system is triangular and
no solver for Gaussian kernels applies. r = x R is a reference of each token, g a factor per head, l the
learned ridge, and S = 0.5 + 1.5 sigmoid(x w), per token and head, the paper's limited-range rescale.

x is the hidden state if ``hidden=`` brings it, otherwise the key. Ours: without hidden= R begins at 1, which
shares the keys as references; l begins at 0.1 (1e-10 there, which amplifies by the number of equal tokens);
S begins at 1, and its bounds are fixed (they are learned there); r is not rotated.

Strengths: what similar earlier tokens say is subtracted from a token's value, so that the regression fits
the values where softmax smooths them. Of equal tokens the last one gets most of the weight. New tokens do
not change the solved values of old ones, so a decoding step needs one more product with all references.
Limitations: causal only. Duplicates still count as often as they occur: K has rows that sum to 1, so weights
sum to 1 / (1 + l) where S = 1. Weights are unbounded: a token like many earlier ones has a small pivot. The
system is written out, so memory grows with the square of the length, and windows are unsupported.

>>> import torch
>>> from unsoft.modules.build import mechanism
>>> layer = mechanism("cubit", heads=1, head_dim=2)
>>> k = torch.tensor([[9.0, 0.0], [0.0, 9.0], [0.0, 9.0]])[None, None]            # the last two are clones
>>> _, weights = layer(0 * k, k, k, is_causal=True, return_weights=True)
>>> weights[0, 0, 2]          # 1/3 / 1.1 and, for the clones, 1/3 / 0.6 and 1/3 (1 - 0.5 / 0.6) / 1.1
tensor([0.3030, 0.0505, 0.5556], grad_fn=<SelectBackward0>)
"""

import math

import torch
from torch import Tensor, nn

from unsoft.engines.call import finite_part
from unsoft.formula import Formula, Properties
from unsoft.modules.cache import Cache, KeyValueCache, of_kind
from unsoft.modules.definition import Layer, Pointwise, WrittenCall, logits_of, over, shares, visible_part
from unsoft.modules.module import Inputs, Mechanism, Result, TokenFactor
from unsoft.modules.pointwise import keys_there
from unsoft.modules.registry import family, resolve_formula
from unsoft.modules.spec import LayerSpec

_LOW, _RANGE = 0.5, 1.5
"""S lies between 0.5 and 2."""
_RIDGE = 0.1


class Solved(KeyValueCache):
    """Keys and solved values; and the references of all tokens, with 1 for those that are no padding."""

    only_keys_and_values = False

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.references = KeyValueCache(batch)

    @property
    def keeps_keys(self) -> bool:
        return True

    @property
    def parts(self) -> tuple[Cache, ...]:
        return (self.references,)


class Cubit(Mechanism):
    """See the module's docstring."""

    causal_only = uses_hidden = needs_all_keys = True
    formula_names = ("base",)

    def __init__(self, layer_spec: LayerSpec, base: Formula | None = None) -> None:
        super().__init__(layer_spec)
        heads = layer_spec.heads
        self.base = base or resolve_formula("softmax")
        self.reference = TokenFactor(layer_spec, width=layer_spec.head_dim)
        self.rescale = TokenFactor(layer_spec, width=1, start=-math.log(2))  # S = 0.5 + 1.5 / 3 = 1
        self.sharpness = nn.Parameter(torch.ones(heads))
        self.log_ridge = nn.Parameter(torch.full((heads,), math.log(_RIDGE)))
        self.reference.begin_as_map()

    def new_cache(self, batch: int) -> Cache:
        return Solved(batch)

    def attend(self, inputs: Inputs) -> Result:
        inputs = inputs.as_autocast()
        given = inputs.for_query_heads("cubit")
        if given is None:  # nothing to solve for, or what does not fit
            return inputs.run(self.base)
        with torch.autocast(inputs.query.device.type, enabled=False):
            value, system, scale = self._solved(given, None)
            result = given.change(value=value, hidden=None).run(self.base)
            if not isinstance(result, tuple):
                return result.to(inputs.query.dtype)
            weights = torch.linalg.solve_triangular(system, result[1], upper=False, left=False) * scale.mT
            return result[0].to(inputs.query.dtype), weights.to(inputs.query.dtype)

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        cache, inputs = of_kind(Solved, cache), inputs.as_autocast()
        if inputs.return_weights:
            raise ValueError(
                "argument 'return_weights': a cache of cubit holds solved values, not those given"
            )
        given = inputs.for_query_heads("cubit")
        if given is None:
            return super().attend_cached(inputs, cache)
        with torch.autocast(inputs.query.device.type, enabled=False):
            cache.check(given.key)
            value, _, _ = self._solved(given, cache)
            tokens = self.with_cached_tokens(given.change(value=value, hidden=None), cache)
            out = tokens.run(self.base)
        assert isinstance(out, Tensor)
        return out.to(inputs.query.dtype)

    def _solved(self, inputs: Inputs, cache: Solved | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the solved values of the new tokens, the part K + l I of the system between them, and S."""
        # What is not finite makes the rows that see it NaN, not the references of all tokens after it.
        key, value = finite_part(inputs.key), inputs.value
        r = self.reference(key, inputs.hidden)
        scale = _LOW + _RANGE * self.rescale(key, inputs.hidden).sigmoid()
        there = keys_there(inputs.options["attn_mask"], key.shape[-2], cache is not None)
        present = torch.ones_like(key[..., :1])
        if there is not None:
            present = torch.where(there[..., None], present, 0.0)
            value = torch.where(there[..., None], value, 0.0)
        length = r.norm(dim=-1, keepdim=True)
        unit = self.sharpness.to(r.dtype)[:, None, None] * r / torch.where(length == 0, 1.0, length)
        past = 0 if cache is None else cache.length
        units, all_present = (unit, present) if cache is None else cache.references.append(unit, present)
        tokens = key.shape[-2]
        seen = torch.ones(tokens, past + tokens, dtype=torch.bool, device=key.device).tril(past)
        itself = torch.eye(tokens, dtype=torch.bool, device=key.device)
        seen = (seen & (all_present.mT > 0)) | nn.functional.pad(itself, (past, 0))  # padding sees itself
        # Every token sees itself: no row of the softmax is empty, and the diagonal of the triangular system
        # is at least the ridge: it can be solved.
        kernel = (r @ units.mT).masked_fill(~seen, -torch.inf).softmax(-1)
        ridge = self.log_ridge.to(r.dtype).exp()[:, None, None]
        system = kernel[..., past:] + ridge * itself.to(kernel.dtype)
        rhs = scale * value
        if past and cache is not None:
            rhs = rhs - kernel[..., :past] @ cache.keys_and_values()[1]
            rhs = rhs * present  # padding has no value, whatever it resembles
        return torch.linalg.solve_triangular(system, rhs, upper=False) * present, system, scale


def definition(call: WrittenCall, layer: Layer, formula: Pointwise) -> tuple[Tensor, Tensor]:
    """A (K + l I)^-1 S, from the left (Zheng et al. 2026, as in InternLM's olmo_cubit)."""
    key = call.spread(call.key)
    r = key @ layer.reference.weight + layer.reference.constant[:, None]
    unit = over(r, r.norm(dim=-1, keepdim=True)) * layer.sharpness[:, None, None]
    there = call.there[:, :, None]
    before = (call.keys <= call.keys[:, None]) & there
    kernel = shares(call.move(r @ unit.mT), before | torch.eye(key.shape[2], dtype=torch.bool))
    system = kernel + layer.log_ridge.exp()[:, None, None] * torch.eye(key.shape[2], dtype=key.dtype)
    s = 0.5 + 1.5 * (key @ layer.rescale.weight + layer.rescale.constant[:, None]).sigmoid()
    attended = visible_part(formula(logits_of(call)), call.visible)
    weights = torch.linalg.solve_triangular(system, attended, upper=False, left=False) * s.mT
    return weights, weights @ torch.where(there.mT, call.spread(call.value), 0.0)


family(
    "cubit",
    Cubit,
    summary="softmax over values from a kernel ridge regression between the tokens",
    paper="Zheng et al. 2026, arXiv 2605.06501",
    properties=Properties(signed=True),
    base="softmax",
)
