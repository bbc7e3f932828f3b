"""magnitude: a gate on every key from the geometry of the keys, so that a crowd of look-alikes counts as one.

    Z_jl = exp(-t |k_j - k_l|^2 / d)        (Z + eps) w = 1        gate_j = sigmoid(beta w_j + gamma)

    where="values"    out_i = sum_j a_ij gate_j v_j                               as in Rosić 2026
    where="mass"      out_i = sum_j a'_ij v_j,   a' = gate_j f(s_ij), normalised anew

Source: Rosić 2026, which has the bidirectional gate on values, after a few steps of conjugate gradients.

Stands around any mechanism: "magnitude+cog", "magnitude+linear-relu"; "magnitude" alone is "magnitude+softmax". t (positive by
construction), beta and gamma are learned, one of each per head; heads that share a key head use the mean of theirs.

Attention that is not causal solves the system of all keys, by ``solver`` (cg, ``iterations`` steps; cholesky; lowrank, up to
``rank``). Causal attention has four forms, ``causal=``:

- auto (the default): arrival for the first ``exact`` tokens, streaming after them. State and cost of a token are bounded.
- arrival: the gate of key j is computed from the keys up to j, exactly, and stays. Fused kernels; a new token costs O(n^2).
- prefix: row i uses the weights that the keys have in its own prefix, exactly. The gates of all rows are O(n^2).
- streaming: arrival with a state of fixed size: exact in chunks of ``chunk``, ``centres`` stand for what came before.

Which of the two ``auto`` uses is a matter of the position alone, so training, prefill and decoding agree.

Can: tell a crowd's size from its worth: 50 clones of relevance 1 leave a unique key of relevance 20 the share 0.286 under softmax,
0.73 on the mass with the gate sigmoid(4 w - 2), 0.999 with sigmoid(12 w - 8). Cannot: keep the weights of single keys steady where
keys nearly coincide (their sum is far steadier), or know which member of a crowd matters. ``start="plain"`` is beta = 1, gamma = 0 (the
paper gives no start values); ``start="open"`` begins with gates of 0.9999, for pretrained models. docs/magnitude.md has the numbers.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("magnitude+cog", heads=2, head_dim=4, where="mass", eps=0.1)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> layer(q, k, v, is_causal=True).shape
torch.Size([1, 2, 6, 4])
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from unsoft.engines.arguments import checked_call
from unsoft.engines.call import Call, compute_dtype
from unsoft.formula import Formula
from unsoft.formula.analysis import Properties
from unsoft.magnitude.arriving import ExactArrival, StreamedArrival
from unsoft.magnitude.cholesky import cholesky, matrix, working_dtype
from unsoft.magnitude.factor import inverse_factor
from unsoft.magnitude.implicit import solved_weights
from unsoft.magnitude.lowrank import lowrank_weights
from unsoft.magnitude.points import Points, checked_eps
from unsoft.magnitude.prefix import arrival_weights
from unsoft.magnitude.streaming import CENTRES, CHUNK, streamed_weights
from unsoft.magnitude.truncated import truncated_weights
from unsoft.mechanisms.core.cache import Cache
from unsoft.mechanisms.core.gated_mass import MassGate
from unsoft.mechanisms.core.module import Around, Inputs, Mechanism, Place, Pointwise
from unsoft.mechanisms.core.registry import family, module_modifier, resolve
from unsoft.mechanisms.magnitude_cache import MagnitudeCache
from unsoft.mechanisms.magnitude_rows import attend_by_rows

WHERE, SOLVERS = ("values", "mass"), ("cg", "cholesky", "lowrank")
CAUSAL = ("auto", "arrival", "prefix", "streaming")
STARTS = {"plain": (1.0, 0.0), "open": (0.0, 9.0)}
"""beta and gamma. Open: beta is 0, so no key, however placed, moves the gate from sigmoid(9) = 0.9999; it learns from there."""
EXACT = 256
"""Tokens for which causal="auto" is exact."""
_LEAST_EPS = 1e-6
_RESIDUAL = 1e-4


class Magnitude(Around):
    """See the module's docstring."""

    needs_all_keys = True

    def __init__(
        self, inner: Mechanism, *, where: str = "values", causal: str = "auto", start: str = "plain", t: float = 1.0,
        eps: float = 0.1, solver: str = "cg", iterations: int = 5, rank: int = 64, exact: int = EXACT, centres: int = CENTRES,
        chunk: int = CHUNK,
    ) -> None:  # fmt: skip
        super().__init__(inner)
        for name, value, known in (
            ("where", where, WHERE), ("causal", causal, CAUSAL), ("solver", solver, SOLVERS), ("start", start, STARTS),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(
                    f"magnitude: argument '{name}' must be one of {', '.join(known)}, not {value!r}"
                )
        for name, count in (
            ("iterations", iterations),
            ("rank", rank),
            ("exact", exact),
            ("centres", centres),
            ("chunk", chunk),
        ):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(
                    f"magnitude: argument '{name}' must be a whole number of at least 1, not {count!r}"
                )
        if not (isinstance(t, (int, float)) and 0 < t < math.inf):
            raise ValueError(f"magnitude: argument 't' must be a positive number, not {t!r}")
        self.eps = checked_eps(eps, "magnitude", _LEAST_EPS)
        self.where, self.causal, self.solver = where, causal, solver
        self.iterations, self.rank, self.centres, self.chunk = iterations, rank, centres, chunk
        self.first = exact if causal == "auto" else chunk
        if where == "mass":
            self.inner = MassGate(inner)
        heads, (beta, gamma) = inner.place.heads, STARTS[start]
        self.log_t = nn.Parameter(torch.full((heads,), math.log(t)))
        self.beta = nn.Parameter(torch.full((heads,), beta))
        self.gamma = nn.Parameter(torch.full((heads,), gamma))

    @torch.no_grad()
    def open_start(self) -> None:
        """Gates of sigmoid(9) = 0.9999 for every key."""
        beta, gamma = STARTS["open"]
        self.beta.fill_(beta)
        self.gamma.fill_(gamma)

    def extra_repr(self) -> str:
        how = (
            f"solver={self.solver}, iterations={self.iterations}"
            if self.solver == "cg"
            else f"solver={self.solver}"
        )
        return f"where={self.where}, causal={self.causal}, eps={self.eps:g}, {how}"

    def attend(self, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        call = self._call(inputs)
        points = self._points(inputs, call)
        if 0 in points.x.shape[:2] or call.q.numel() == 0:  # nothing to weigh, or nobody to see it
            return self._gated(inputs, self._gate(points.x.sum(-1), points))
        if call.causal_offset is None:
            return self._gated(inputs, self._gate(self._bidirectional(points), points))
        if self.causal == "prefix":
            x = points.x.to(working_dtype(points.x.dtype, self.eps))
            m = inverse_factor(matrix(x, points.present, self.eps))
            y = (m @ points.ones.to(x.dtype)[..., None])[..., 0]
            return attend_by_rows(self, inputs, m, y, None, call.causal_offset)[0]
        return self._gated(inputs, self._gate(self._arrival(points), points))

    def _arrival(self, points: Points) -> Tensor:
        if self.causal == "arrival" or points.x.shape[1] <= self.first:
            return arrival_weights(points.x, points.present, points.ones, self.eps)
        return streamed_weights(
            points.x, points.present, self.eps, centres=self.centres, chunk=self.chunk, first=self.first
        )

    def new_cache(self, batch: int) -> Cache:
        exact = self.causal in ("arrival", "prefix")
        arriving = ExactArrival() if exact else StreamedArrival(self.centres, self.chunk, self.first)
        return MagnitudeCache(batch, arriving, self.inner.new_cache(batch), rows=self.causal == "prefix")

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Tensor | tuple[Tensor, Tensor]:
        if not isinstance(cache, MagnitudeCache):
            raise TypeError(
                f"argument 'cache' is a {type(cache).__name__}; this mechanism's new_cache() makes another kind"
            )
        cache.check(inputs.key)
        plain = inputs.options["attn_mask"] is None and inputs.geometry_keys is None
        if plain and not cache.rows and not torch.is_grad_enabled():
            constants = self._constants(cache, inputs.key)
            found = cache.arriving.gate(inputs.key, inputs.value, self.eps, constants)
            if found is not None:
                cache.length += inputs.key.shape[2]
                return self._gated(inputs, *found, cache)
        points = self._plain_points(inputs.key, cache) if plain else self._new_points(inputs, cache)
        new = points.x.shape[1]
        if 0 in points.x.shape[:2]:
            weights = points.x.detach().sum(-1)
        else:
            weights = cache.arriving.add(points.x.detach(), points.present, self.eps)
        cache.length += new
        if cache.rows:
            keys, values = cache.inner.append(inputs.key, inputs.value)
            whole = inputs.change(
                key=keys, value=values, options=inputs.options | {"is_causal": "lower_right"}
            )
            if inputs.query.numel() == 0 or keys.numel() == 0:
                return self.attend(whole)
            window, rows = cache.arriving.window, inputs.query.shape[-2]
            before = cache.last_row if rows == new else None  # it is the row before the first new key
            result, cache.last_row = attend_by_rows(
                self, whole, window.m, window.y, before, cache.length - rows
            )
            return result
        return self._gated(inputs, self._gate(weights, points), None, cache)

    def _new_points(self, inputs: Inputs, cache: MagnitudeCache) -> Points:
        """The points of the keys that a step of decoding brings."""
        new, options = inputs.key.shape[-2], inputs.options | {"is_causal": True}
        mask = options["attn_mask"]
        if isinstance(mask, Tensor) and mask.shape[-1] == cache.length + new:
            options["attn_mask"] = mask[..., cache.length :]  # which of the new keys are there?
        query = (
            inputs.query[..., inputs.query.shape[-2] - new :, :]
            if new < inputs.query.shape[-2]
            else inputs.query
        )
        return self._points(inputs, self._call(inputs.change(query=query, options=options)))

    def _plain_points(self, key: Tensor, cache: MagnitudeCache) -> Points:
        """The same without masks, at little cost: what is wrong with the call, the mechanism inside says."""
        keys = key.detach().to(compute_dtype(key.dtype))
        root, _, _ = self._constants(cache, keys)
        return Points((keys * root).flatten(0, 1), None, key.shape[:2])

    def _constants(self, cache: MagnitudeCache, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """sqrt(t / d), (heads, 1, 1), and beta and gamma, (heads, 1), of each key head; without a gradient, computed once."""
        parameters = (self.log_t, self.beta, self.gamma)
        stamp = (key.shape[1], key.shape[-1], *(x for p in parameters for x in (p.data_ptr(), p._version)))
        if cache.constants is None or cache.constants[0] != stamp:
            with torch.no_grad():
                like = key.to(compute_dtype(key.dtype))
                beta, gamma = (_by_key_head(x, key.shape[1]).to(like.dtype)[:, None] for x in parameters[1:])
                cache.constants = stamp, (self._root(key.shape[1], like), beta, gamma)
        return cache.constants[1]

    def gate(self, weights: Tensor) -> Tensor:
        """sigmoid(beta w + gamma) for weights (batch, key heads, ...)."""
        heads, more = weights.shape[1], (1,) * (weights.dim() - 2)
        beta, gamma = (
            _by_key_head(x, heads).to(weights.dtype).view(-1, *more) for x in (self.beta, self.gamma)
        )
        return (beta * weights + gamma).sigmoid()

    def _gate(self, weights: Tensor, points: Points) -> Tensor:
        return self.gate(points.shaped(weights)).reshape(*points.leading, weights.shape[-1])

    def _bidirectional(self, points: Points) -> Tensor:
        x, present, b = points.x, points.present, points.ones
        if self.solver == "cg":
            return truncated_weights(x, present, b, self.eps, self.iterations, check=False)[0]
        if self.solver == "lowrank":
            return lowrank_weights(x, present, b, self.eps, self.rank, _RESIDUAL, check=False)[0]
        return solved_weights(
            x, present, b, lambda x, present, b: cholesky(x, present, b, self.eps, _RESIDUAL)
        )[0]

    def _gated(
        self, inputs: Inputs, gate: Tensor, value: Tensor | None = None, cache: MagnitudeCache | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention with a gate (batch, key heads, keys) that is the same for all rows. ``value``: times the gate, if that is known."""
        gate = gate.reshape(*inputs.key.shape[:-1])
        if self.where == "mass":
            if cache is None:
                return self.inner.attend_gated(inputs, gate)
            return self.inner.attend_gated(inputs, gate, cache.inner, cache.all_gates(gate))
        if value is None:
            value = _times(inputs.value, gate[..., None].to(inputs.value.dtype))
        gated = inputs.change(value=value)
        result = self.inner.attend(gated) if cache is None else self.inner.attend_cached(gated, cache.inner)
        if not isinstance(result, tuple):
            return result
        if cache is not None:
            raise ValueError(
                "argument 'return_weights': with a cache the gates of earlier keys are in their values already"
            )
        every = result[1].shape[-3] // gate.shape[-2]
        return result[0], result[1] * gate.repeat_interleave(every, dim=-2)[..., None, :].to(result[1].dtype)

    def _call(self, inputs: Inputs) -> Call:
        """The call, checked: its mask says which keys are there."""
        options = {name: x for name, x in inputs.options.items() if name not in ("engine", "positions")}
        if self.query_heads != self.place.heads:  # several queries for each head share its key
            options["enable_gqa"] = True
        return checked_call(inputs.query, inputs.key, inputs.value, resolve("softmax"), **options)[0]

    def _points(self, inputs: Inputs, call: Call) -> Points:
        """The keys that the geometry is taken from, scaled by t; a key that no row may see, or that is not finite, is not there."""
        keys = (
            call.k
            if inputs.geometry_keys is None
            else _checked_geometry(inputs.geometry_keys, inputs.key, call.k)
        )
        present = _seen_by_some_row(call)
        keys = keys.to(compute_dtype(keys.dtype))
        finite = keys.isfinite().all(-1)
        if torch.compiler.is_compiling() or not bool(finite.all()):
            present = finite if present is None else present & finite
            keys = torch.where(finite[..., None], keys, 0.0)
        if present is not None:
            keys = torch.where(present[..., None], keys, 0.0)
            present = present.expand(keys.shape[:-1]).flatten(0, 1)
        return Points((keys * self._root(keys.shape[1], keys)).flatten(0, 1), present, keys.shape[:2])

    def _root(self, heads: int, keys: Tensor) -> Tensor:
        """sqrt(t / d) of each key head, (heads, 1, 1)."""
        scale = _by_key_head(self.log_t, heads).to(keys.dtype).exp() / keys.shape[-1]
        return scale.sqrt()[:, None, None]


def _times(value: Tensor, gate: Tensor) -> Tensor:
    """The product; the gradient of the gate knows nothing of a value that is not finite, which may belong to a masked key."""
    if not gate.requires_grad:
        return value * gate
    finite = value.isfinite()
    if not torch.compiler.is_compiling() and bool(finite.all()):
        return value * gate
    return torch.where(finite, value, 0.0) * gate + torch.where(finite, 0.0, value)


def _by_key_head(parameter: Tensor, heads: int) -> Tensor:
    """One value for each key head: the mean of those of the query heads that share it."""
    if len(parameter) == heads:
        return parameter
    if heads == 0 or len(parameter) % heads:
        raise ValueError(
            f"magnitude: argument 'key' has {heads} heads; the mechanism was made for {len(parameter)}"
        )
    return parameter.unflatten(0, (heads, -1)).mean(-1)


def _seen_by_some_row(call: Call) -> Tensor | None:
    """Bool (B|1, Hk|1, S): may any row see the key?"""
    if call.visible is None:
        return None
    if call.visible.shape[2] > 1 and call.causal_offset is None:
        raise ValueError(
            "magnitude: argument 'attn_mask' differs from row to row; the gates of keys would tell a row of keys that it must not see."
            " Pass is_causal=True, or a mask of whole keys (..., 1, S)"
        )
    seen = call.visible.any(2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (call.k.shape[1], -1)).any(2)
    return seen


def _checked_geometry(keys: Tensor, key: Tensor, k: Tensor) -> Tensor:
    if not isinstance(keys, Tensor) or keys.shape[:-1] != key.shape[:-1]:
        got = tuple(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
        raise ValueError(
            f"magnitude: argument 'geometry_keys' is {got}; expected a tensor (..., key heads, S, width) like 'key', {tuple(key.shape)}"
        )
    return keys.expand(*key.shape[:-1], keys.shape[-1]).reshape(*k.shape[:3], keys.shape[-1])


def _around_softmax(place: Place, base: Formula, **options: object) -> Magnitude:
    return Magnitude(Pointwise(base, place), **options)


_SUMMARY = "a gate on every key from the geometry of the keys: a crowd of look-alikes counts as one"
family(
    "magnitude",
    _around_softmax,
    summary=_SUMMARY,
    paper="Rosić 2026",
    properties=Properties(False, "in (0, 1)", "< 1", False, False, True),
    base="softmax",
)
module_modifier("magnitude", Magnitude, summary=_SUMMARY)
