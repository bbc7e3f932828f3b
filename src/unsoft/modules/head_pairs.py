"""Pairs of maps, for mechanisms that subtract one map from another.

In pairs of heads, query and key heads 2p and 2p + 1 are the two maps of pair p, and both apply to the values
of both, joined. In pairs of queries (:func:`run_query_pairs`), query heads 2h and 2h + 1 share the key head
and the values of output head h; in a :class:`QueryPair` the second query is made of the first.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from unsoft.engines.call import compute_dtype
from unsoft.formula import Formula
from unsoft.modules.cache import Cache, KeyValueCache
from unsoft.modules.module import Inputs, Mechanism, Result
from unsoft.modules.registry import resolve_formula
from unsoft.modules.spec import LayerSpec


def check_pairs(name: str, layer_spec: LayerSpec) -> None:
    """Raise ValueError unless heads can be paired."""
    if layer_spec.heads % 2:
        raise ValueError(
            f"{name}: argument 'heads' must be even, since heads come in pairs, not {layer_spec.heads}"
        )


def joined(value: Tensor) -> Tensor:
    """Return values (..., heads, keys, Dv) of neighbouring heads side by side: (..., pairs, keys, 2 Dv)."""
    pairs: Tensor = value.unflatten(-3, (-1, 2)).transpose(-3, -2).flatten(-2)
    return pairs


def split(out: Tensor) -> Tensor:
    """Undo :func:`joined` for outputs (..., pairs, queries, 2 Dv).

    >>> import torch
    >>> x = torch.arange(8.0).view(1, 2, 2, 2)
    >>> torch.equal(split(joined(x)), x)
    True
    """
    heads: Tensor = out.unflatten(-1, (2, -1)).transpose(-3, -2).flatten(-4, -3)
    return heads


def difference_of_maps(
    inputs: Inputs, formula: Formula, strength: Tensor, params: Mapping[str, Tensor] | None = None
) -> list[Tensor]:
    """Return A1 v - strength A2 v for the two maps of each pair and joined values v; then, if
    ``return_weights``, A1 - strength A2. In float32 at least, so that what is left of a difference is rounded
    once."""
    inputs = inputs.change(wide=True)
    mask, maps = inputs.options["attn_mask"], []
    by_head = isinstance(mask, Tensor) and mask.dim() >= 3 and mask.shape[-3] > 1
    for which in (0, 1):
        query, key = (x[..., which::2, :, :] for x in (inputs.query, inputs.key))
        half = inputs.with_options(attn_mask=mask[..., which::2, :, :] if by_head else mask)
        result = half.change(query=query, key=key).run(formula, params)
        maps.append(result if isinstance(result, tuple) else (result,))
    dtype = compute_dtype(inputs.query.dtype)
    return [first.to(dtype) - strength * second.to(dtype) for first, second in zip(*maps, strict=True)]


def run_query_pairs(inputs: Inputs, formula: Formula) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of the two maps of each head, for queries (..., 2 heads, L, D); then, if
    ``return_weights``, the maps. Half precision is widened: rounding both maps before they are subtracted
    would make the error of the difference 1.4 times as large.

    Neighbouring queries read the same key head under grouped-query attention too: (2h) // (2 group) is
    h // group. So keys are read once, and no dense matrix is formed.
    """
    mask = inputs.options["attn_mask"]
    if isinstance(mask, Tensor) and mask.dim() >= 3 and 1 < mask.shape[-3] == inputs.query.shape[-3] // 2:
        mask = mask.repeat_interleave(2, dim=-3)  # one for both queries of a pair
    result = inputs.change(wide=True).with_options(enable_gqa=True, attn_mask=mask).run(formula)
    results = result if isinstance(result, tuple) else (result,)
    return [(x[..., 0::2, :, :], x[..., 1::2, :, :]) for x in results]


class QueryPair(Mechanism):
    """Base of mechanisms a A(q) v - b A(r) v: two maps of one formula over the same keys and values.

    A subclass defines r, a and b, or overrides :meth:`_both` and :meth:`_combined` instead.
    """

    takes_window = packs_documents = True
    formula_names = ("base",)
    prepares_steps = True

    def __init__(self, layer_spec: LayerSpec, base: Formula | None = None) -> None:
        super().__init__(layer_spec)
        self.base = base or resolve_formula("softmax")

    def second_query(self, query: Tensor) -> Tensor:
        """Return r, of the shape of the query."""
        raise NotImplementedError

    def factors(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return a and b, each broadcastable to (..., heads, L, 1)."""
        raise NotImplementedError

    def prepared_step(self, inputs: Inputs, cache: Cache) -> Tensor | None:
        if type(cache) is not KeyValueCache or not cache.length or not self._fits(inputs):
            return None
        both = self._both(inputs.query)
        maps = cache.step_by(
            self.base, both, inputs.key, inputs.value, inputs.options["scale"], enable_gqa=True
        )
        return None if maps is None else self._combined(inputs, maps[:, 0::2], maps[:, 1::2])

    def attend(self, inputs: Inputs) -> Result:
        if not self._fits(inputs):
            return inputs.run(self.base)  # raises: its message says what does not fit
        inputs = inputs.as_autocast()
        maps = run_query_pairs(inputs.change(query=self._both(inputs.query)), self.base)
        out, *weights = (self._combined(inputs, first, second) for first, second in maps)
        return (out, weights[0]) if weights else out

    def _combined(self, inputs: Inputs, first: Tensor, second: Tensor) -> Tensor:
        a, b = self.factors(inputs)
        wide = compute_dtype(first.dtype)  # the difference of two maps is rounded once
        difference = torch.addcmul(a * first.to(wide), b.to(wide), second.to(wide), value=-1)
        return inputs.rounded(difference)

    def _both(self, query: Tensor) -> Tensor:
        """Return the two queries of head h as heads 2h and 2h + 1: groups of key heads stay contiguous."""
        return torch.stack((query, self.second_query(query)), dim=-3).flatten(-4, -3)

    def _fits(self, inputs: Inputs) -> bool:
        """Return True if the heads of queries and keys fit together."""
        return inputs.heads_fit


class JoinedValueCache(KeyValueCache):
    """Keys of single heads, and values of pairs of heads side by side."""

    _views: tuple[Tensor, Tensor, tuple[Tensor, Tensor]] | None = None
    """The buffers that the views of :attr:`buffers` belong to, and these views."""

    @property
    def buffers(self) -> tuple[Tensor | None, Tensor | None]:
        """Keys (batch * pairs, 2, room, D) and values (batch * pairs, 2, room, 2 Dv) for one prepared step.

        Both heads of a pair share its values: their stride is 0, and a step writes the same numbers twice.
        """
        keys, values = self._keys, self._values
        if keys is None or values is None:
            return None, None
        if self._views is None or self._views[0] is not keys or self._views[1] is not values:
            self._views = keys, values, (_as_pairs(keys), _shared_by_pair(values))
        return self._views[2]

    def _laid_out(self, value: Tensor) -> Tensor:
        return joined(value)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        keys, values = super().keys_and_values()
        return keys, split(values)

    def step_by_pairs(self, formula: Formula, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        """Return the outputs (batch, pairs, queries, 2 Dv) of both maps by one prepared step, or None."""
        query, key, value = inputs.query, inputs.key, inputs.value
        if not self.length or any(x.dim() != 4 or x.shape[1] % 2 for x in (query, key, value)):
            return None
        (batch, heads, tokens, width), shared = query.shape, key.shape[1]
        group = heads // shared if shared else 0
        if group * shared != heads or (group > 1 and not inputs.options["enable_gqa"]):
            return None
        # Query pair p reads key pair p // group: a key head serves the same map of ``group`` pairs.
        grouped = query.reshape(-1, group, 2, tokens, width).transpose(1, 2).flatten(1, 2)
        new = grouped, key.reshape(-1, 2, *key.shape[2:]), _shared_by_pair(joined(value))
        maps = self.step_by(formula, *new, inputs.options["scale"], enable_gqa=True)
        if maps is None:
            return None
        first, second = maps.view(batch, shared // 2, 2, group, tokens, -1).unbind(2)
        return first.flatten(1, 2), second.flatten(1, 2)


def _as_pairs(x: Tensor) -> Tensor:
    batch, heads, *rest = x.shape
    return x.view(batch * heads // 2, 2, *rest)


def _shared_by_pair(values: Tensor) -> Tensor:
    return values.flatten(0, 1)[:, None].expand(-1, 2, -1, -1)
