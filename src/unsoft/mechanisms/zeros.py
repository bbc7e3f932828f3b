"""zeros: zero-sum linear attention: softmax over a logit of each key alone, without its mean, times a cosine.

    a_ij = r_ij cos(q_i, k_j)
    r_ij = g_i d_ij / n + h_i (softmax_j(c) - 1/n - d_ij / n)          d_ij = c_j - mean of c
    c_j = - u_j . mean(u_1 ... u_j) / sqrt(D)           u = x U,   g = sigmoid(x w),   h = sigmoid(x w')

Softmax and means are over the n keys up to token i. The logit c_j says how much token j deviates from those
before it; g and h weigh the linear and the nonlinear part of its softmax; 1/n, the part that treats all keys
alike, is dropped. r is a sum of products of a number of token i and one of token j, hence linear time.

Paper: Lu et al., ZeroS: Zero-Sum Linear Attention for Efficient Transformers, arXiv 2602.05230 (NeurIPS
2025). Checked against ``ZeroSAttention`` of the authors' LJC-FVNR/SequenceLab, whose mean of u begins with
a learned vector that counts as exp(tau) tokens, as here. Not part of this mechanism: the
normalisation of the output, which the authors' layer applies per head, rotary embedding, and 1/n kept in the
first layer. x is the hidden state if ``hidden=`` brings it, otherwise the key for u and the query for g and
h. Ours: c stays within [-30, 30], so that exponentials cannot overflow, and without hidden= U begins at 1.

Strengths: it subtracts in linear time, with a state of three matrices per head, and what all keys have in
common cancels instead of growing with the length.
Limitations: it looks back only. r sums to 0, but the weights, with the cosine, do not. How much a key counts
does not depend on the query, only its sign and angle do. The first token outputs 0, and outputs shrink with
n: a norm should follow. Keys that a mask hides from all rows are left out of n; a mask that hides keys from
some rows only removes their weights.

>>> import torch
>>> from unsoft.modules.build import mechanism
>>> layer = mechanism("zeros", heads=1, head_dim=2)
>>> q, k = torch.ones(1, 1, 3, 2), torch.tensor([[1.0, 1.0], [-1.0, -1.0], [2.0, 2.0]])[None, None]
>>> _, weights = layer(q, k, k, is_causal=True, return_weights=True)
>>> (weights * torch.tensor([1.0, -1.0, 1.0])).sum(-1).abs().max() < 1e-6        # without the signs of cos
tensor(True)
"""

import math

import torch
from torch import Tensor, nn

from unsoft.engines.call import finite_part
from unsoft.formula import Properties
from unsoft.modules.cache import Cache, StateCache, of_kind
from unsoft.modules.definition import Layer, WrittenCall, mask_factor, over, shares
from unsoft.modules.linear import Linear, unchanged
from unsoft.modules.module import Inputs, Result, TokenFactor
from unsoft.modules.pointwise import keys_there
from unsoft.modules.registry import family
from unsoft.modules.spec import LayerSpec

_BOUND = 30.0
"""Limit of |c|: exp(30) is 1e13, so that sums over 1e20 keys and their inverses stay in range of float32."""


class Sums(StateCache):
    """The state of linear attention, and the sums over all tokens so far of u, exp(c), c and 1."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.sums: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, *self.sums)

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        self.sums = tuple(x[index] for x in self.sums)


class ZeroS(Linear):
    """See the module's docstring."""

    causal_only = uses_hidden = True

    def __init__(self, layer_spec: LayerSpec) -> None:
        super().__init__(layer_spec, unchanged, normaliser="none")
        self.deviation = TokenFactor(layer_spec, width=layer_spec.head_dim)
        self.gate = TokenFactor(layer_spec, width=2)
        self.prior = nn.Parameter(torch.zeros(layer_spec.heads, layer_spec.head_dim))
        self.log_count = nn.Parameter(torch.zeros(layer_spec.heads))
        self.deviation.begin_as_map()  # with U = 0 all weights and gradients would be 0

    def new_cache(self, batch: int) -> Cache:
        return Sums(batch)

    def attend(self, inputs: Inputs) -> Result:
        inputs = inputs.as_autocast()
        with torch.autocast(inputs.query.device.type, enabled=False):
            return _as_dtype(super().attend(self._separated(inputs, None)), inputs.query.dtype)

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        cache, inputs = of_kind(Sums, cache), inputs.as_autocast()
        cache.check(inputs.key)
        with torch.autocast(inputs.query.device.type, enabled=False):
            out = super().attend_cached(self._separated(inputs, cache), cache)
        return _as_dtype(out, inputs.query.dtype)

    def _separated(self, inputs: Inputs, cache: Sums | None) -> Inputs:
        """Return queries (a, b, f) q and keys (exp(c), c, 1) k, whose products are the weights."""
        given = inputs.for_query_heads("zeros")
        if given is None:
            return inputs  # nothing to see; or the engine raises, and says what does not fit
        query, key, hidden = given.query, given.key, given.hidden
        length, keys = query.shape[-2], key.shape[-2]
        u = self.deviation(finite_part(key), hidden)
        there = keys_there(inputs.options["attn_mask"], keys, cache is not None)
        present = torch.ones_like(u[..., 0])
        if there is not None:
            present = torch.where(there, present, 0.0)
        c, sums = self._deviations(u, present, cache)
        offset = keys - length if inputs.options["is_causal"] == "lower_right" else 0
        rows = (torch.arange(length, device=key.device) + offset).clamp(0, keys - 1)
        mass, total, count = (x[..., rows, None] for x in sums)
        first, higher = self.gate(finite_part(query), hidden).sigmoid().split(1, dim=-1)
        alone = count.clamp(min=1.0)
        # r = a exp(c) + b c + f: softmax is exp(c) / mass, and d is c - total / n. A row that sees no key has
        # mass 0; its factors do not matter, but must be finite.
        a = higher / torch.where(count > 0, mass, 1.0)
        b = (first - higher) / alone
        f = -(b * total + higher) / alone
        q, k = _direction(query), _direction(key)
        queries = torch.cat((a * q, b * q, f * q), dim=-1)
        keys_ = torch.cat((c.exp()[..., None] * k, c[..., None] * k, k), dim=-1)
        return given.change(query=queries, key=keys_, hidden=None)

    def _deviations(self, u: Tensor, present: Tensor, cache: Sums | None) -> tuple[Tensor, list[Tensor]]:
        """Return c of every key, and the sums of exp(c), c and 1 up to it; all (..., heads, keys)."""
        past = cache.sums if cache is not None else ()
        prior, of_prior = self.prior.to(u.dtype)[:, None], self.log_count.to(u.dtype).exp()[:, None]
        so_far = (u * present[..., None]).cumsum(-2) + (past[0] if past else 0.0)
        count = present.cumsum(-1) + (past[3] if past else 0.0)
        mean = (of_prior[..., None] * prior + so_far) / (of_prior + count)[..., None]
        c = -(u * mean).sum(-1) / math.sqrt(u.shape[-1])
        c = c.clamp(-_BOUND, _BOUND)
        mass = (c.exp() * present).cumsum(-1) + (past[1] if past else 0.0)
        total = (c * present).cumsum(-1) + (past[2] if past else 0.0)
        if cache is not None:
            cache.sums = (so_far[..., -1:, :], *(x[..., -1:] for x in (mass, total, count)))
        return c, [mass, total, count]


def _direction(x: Tensor) -> Tensor:
    """Return vectors of length 1; 0 stays 0, with gradient 0, where dividing by an epsilon gives 1e12."""
    length = x.norm(dim=-1, keepdim=True)
    return torch.where(length == 0, 0.0, x / torch.where(length == 0, 1.0, length))


def _as_dtype(result: Result, dtype: torch.dtype) -> Result:
    return tuple(x.to(dtype) for x in result) if isinstance(result, tuple) else result.to(dtype)  # type: ignore[return-value]


def definition(call: WrittenCall, layer: Layer) -> Tensor:
    """r cos(q, k), with r from the softmax of c without its mean, part by part (Lu et al. 2025)."""
    key, there = call.spread(call.key), call.there.to(call.query.dtype)
    u = key @ layer.deviation.weight + layer.deviation.constant[:, None]
    before = (call.keys[:, None] >= call.keys) * there[:, :, None]
    tau = layer.log_count.exp()[:, None]
    mean = (tau[..., None] * layer.prior[:, None] + before @ u) / (tau + before.sum(-1))[..., None]
    c = (-(u * mean).sum(-1) / u.shape[-1] ** 0.5).clamp(-30, 30)[:, :, None]
    seen = (call.keys <= call.rows[:, None]) & call.there[:, :, None]
    n = seen.sum(-1, keepdim=True).clamp(min=1).to(c.dtype)
    d = c - (c * seen).sum(-1, keepdim=True) / n
    gate = (call.query @ layer.gate.weight + layer.gate.constant[:, None]).sigmoid()
    softmax = shares(c.expand(seen.shape), seen)
    r = gate[..., :1] * d / n + gate[..., 1:] * (softmax - 1 / n - d / n)
    lengths = call.query.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :]
    weights: Tensor = r * over(call.query @ key.mT, lengths) * mask_factor(call)
    return weights


family(
    "zeros",
    ZeroS,
    summary="zero-sum linear attention: what keys have in common cancels",
    paper="Lu et al. 2025, arXiv 2602.05230",
    properties=Properties(signed=True, needs_length=True),
)
