"""magnitude: a gate on every key from the geometry of the keys, so that near-duplicates count as one.

    Z_jl = exp(-t |k_j - k_l|^2 / d)        (Z + eps) w = 1        gate_j = sigmoid(beta w_j + gamma)

    gate="weight"     gate_j = w_j, without beta and gamma: m clones get 1 / m each, as in Rosić's example
    where="values"    out_i = sum_j a_ij gate_j v_j                               as in Rosić 2026
    where="mass"      out_i = sum_j a'_ij v_j,   a' = gate_j f(s_ij), normalised again

Source: Rosić 2026, which has the bidirectional gate on values, after a few steps of conjugate gradients.

Stands around any mechanism: "magnitude+cog", "magnitude+linear-relu"; "magnitude" alone is
"magnitude+softmax". t (positive by construction), beta and gamma are learned, one of each per head; heads
that share a key head use the mean of theirs (of t the geometric mean).

Attention that is not causal solves the system of all keys, by ``solver`` (cg, ``iterations`` steps; cholesky;
lowrank, up to ``rank``). Causal attention has four forms, ``causal=``:

- auto (the default): arrival for the first ``exact`` tokens, streaming after them. State and cost of a token
  are bounded.
- arrival: the gate of key j is computed from the keys up to j, exactly, and stays. Fused kernels; a new token
  costs O(n^2).
- prefix: row i uses the weights that the keys have in its own prefix, exactly. All gates are O(n^2).
- streaming: arrival with a state of fixed size: exact in chunks, ``centres`` stand for what came before.

Which of the two ``auto`` uses is a matter of the position alone, so training, prefill and decoding agree.

Strengths: the size of a crowd no longer counts as relevance. 50 clones of relevance 1 leave a unique key of
relevance 20 the share 0.286 under softmax, 0.73 on the mass with the gate sigmoid(4 w - 2), 0.999 with
sigmoid(12 w - 8), and 0.952 = 20/21 with ``gate="weight"`` at any number of clones (eps -> 0).
Limitations: the weights of single keys are unstable where keys nearly coincide (their sum is far more
stable), and it cannot know which member of a crowd matters. A weight can be negative: ``gate="weight"`` then
subtracts the value, and counts as 0 on the mass. ``start="plain"`` is beta = 1, gamma = 0 (the paper gives no
initial values); ``start="open"`` begins with gates of 0.9999, for pretrained models, which ``gate="weight"``
does not have.
Rotary embedding makes distances depend on positions: :func:`unsoft.hf.swap` compares keys before rotation; in
a model of your own, pass those as ``geometry_keys``. docs/magnitude.md has the numbers.

>>> import torch, unsoft
>>> layer = unsoft.mechanism("magnitude+cog", heads=2, head_dim=4, where="mass", eps=0.1)
>>> q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
>>> layer(q, k, v, is_causal=True).shape
torch.Size([1, 2, 6, 4])
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from unsoft.checks import one_of, positive, whole_number
from unsoft.engines.call import compute_dtype
from unsoft.formula import Interval, Properties
from unsoft.magnitude.gaussian import System
from unsoft.magnitude.points import Points, checked_eps
from unsoft.magnitude.prefix import arrival_weights, prefix_factors
from unsoft.magnitude.solver import Options, solver_names
from unsoft.magnitude.solver import solver as solver_of
from unsoft.magnitude.streaming import CENTRES, CHUNK, Arrival, streamed_weights
from unsoft.modules.cache import Cache, KeyValueCache, of_kind
from unsoft.modules.key_gates import (
    KeyGate,
    MagnitudeCache,
    MassGate,
    PrefixWeights,
    attend_by_rows,
    by_key_head,
    check_transforms,
    gated_values,
    key_points,
)
from unsoft.modules.module import Inputs, Mechanism, Result
from unsoft.modules.pointwise import Pointwise
from unsoft.modules.registry import family, modifier

EXACT = 256
"""Tokens for which causal="auto" is exact."""
WHERE, GATES = ("values", "mass"), ("sigmoid", "weight")
CAUSAL = ("auto", "arrival", "prefix", "streaming")
STARTS = {"plain": (1.0, 0.0), "open": (0.0, 9.0)}
"""beta and gamma. Open: beta is 0, so no key, however placed, moves the gate from sigmoid(9) = 0.9999; it
learns from there.
"""
_LEAST_EPS = 1e-6
"""The diagonal of Z is 1, so float32 loses ridges below 1e-7, and equal keys make Z alone singular."""
_RESIDUAL = 1e-4
"""Where iterations stop early; a sigmoid of the weights needs no more digits."""


class Magnitude(KeyGate):
    """See the module's docstring."""

    needs_all_keys = True
    inner: Mechanism

    def __init__(
        self,
        inner: Mechanism,
        *,
        where: str = "values",
        gate: str = "sigmoid",
        causal: str = "auto",
        start: str = "plain",
        t: float = 1.0,
        eps: float = 0.1,
        solver: str = "cg",
        iterations: int = 5,
        rank: int = 64,
        exact: int = EXACT,
        centres: int = CENTRES,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__(inner)
        one_of("magnitude", "where", where, WHERE)
        one_of("magnitude", "gate", gate, GATES)
        one_of("magnitude", "causal", causal, CAUSAL)
        one_of("magnitude", "solver", solver, solver_names())
        one_of("magnitude", "start", start, STARTS)
        if gate == "weight" and start != "plain":
            raise ValueError(
                "magnitude: argument 'start': gate='weight' has no parameters to start with; use"
                " gate='sigmoid'"
            )
        counts = {"iterations": iterations, "rank": rank, "exact": exact, "centres": centres, "chunk": chunk}
        for name, count in counts.items():
            whole_number("magnitude", name, count)
        self.eps = checked_eps(eps, "magnitude", _LEAST_EPS)
        self.where, self.causal, self.solver = where, causal, solver
        self.iterations, self.rank, self.centres, self.chunk = iterations, rank, centres, chunk
        self.first = exact if causal == "auto" else chunk
        if where == "mass":
            self.inner = MassGate(inner)
        heads, (beta, gamma) = inner.layer_spec.heads, STARTS[start]
        self.log_t = nn.Parameter(torch.full((heads,), math.log(positive("magnitude", "t", t))))
        learned = gate == "sigmoid"
        self.beta = nn.Parameter(torch.full((heads,), beta)) if learned else None
        self.gamma = nn.Parameter(torch.full((heads,), gamma)) if learned else None

    @torch.no_grad()
    def open_start(self) -> None:
        """Set gates of sigmoid(9) = 0.9999 for every key, if they are learned."""
        if self.beta is not None and self.gamma is not None:
            beta, gamma = STARTS["open"]
            self.beta.fill_(beta)
            self.gamma.fill_(gamma)

    @torch.no_grad()
    def set_key_gate(self, *, beta: float, gamma: float, t: float) -> None:
        """Set the gate sigmoid(beta w + gamma) on every key, w its weight in the geometry at the scale t."""
        if self.beta is None or self.gamma is None:
            raise ValueError("set_key_gate: gate='weight' has no beta and gamma")
        for parameter, value in ((self.beta, beta), (self.gamma, gamma), (self.log_t, math.log(t))):
            parameter.fill_(value)

    @property
    def clone_theory(self) -> dict[str, Any] | None:
        """Keywords of :func:`unsoft.theory.magnitude_hijack` if that predicts how much attention clones of a
        key get; otherwise None."""
        base = self.inner.inner if isinstance(self.inner, MassGate) else self.inner
        if not isinstance(base, Pointwise) or base.uses_positions:
            return None
        known = {"base": base.formula, "on": self.where, "eps": self.eps}
        if self.beta is None or self.gamma is None:
            return known | {"gate": "weight"}
        return known | {"slope": self.beta[0].item(), "offset": self.gamma[0].item()}

    def extra_repr(self) -> str:
        steps = f", iterations={self.iterations}" if solver_of(self.solver).truncates else ""
        gate = ", gate=weight" if self.beta is None else ""
        return (
            f"where={self.where}{gate}, causal={self.causal}, eps={self.eps:g}, solver={self.solver}{steps}"
        )

    def attend(self, inputs: Inputs) -> Result:
        check_transforms("magnitude")
        call = self.checked_call(inputs)
        points = key_points(call, inputs, self.log_t)
        if 0 in points.x.shape[:2] or call.q.numel() == 0:  # no keys, or no queries
            return self._gated(inputs, self._gate(points.x.sum(-1), points))
        system = points.system(self.eps, inputs.options["engine"])
        if call.causal_offset is None:
            return self._gated(inputs, self._gate(self._bidirectional(system), points))
        if self.causal == "prefix":
            return self._by_rows(inputs, PrefixWeights(*prefix_factors(system)), None, call.causal_offset)[0]
        return self._gated(inputs, self._gate(self._arrival(system), points))

    def _bidirectional(self, system: System) -> Tensor:
        solver = solver_of(self.solver)
        steps = self.iterations if solver.truncates else None
        rank = self.rank if "rank" in solver.takes else None
        options = Options(_RESIDUAL, steps, rank, check=False)
        return solver.solve(system, system.ones, options).weights

    def _arrival(self, system: System) -> Tensor:
        if self.causal == "arrival" or system.x.shape[1] <= self.first:
            return arrival_weights(system)
        return streamed_weights(system, centres=self.centres, chunk=self.chunk, first=self.first)

    def new_cache(self, batch: int) -> Cache:
        exact = self.causal in ("arrival", "prefix")
        arriving = Arrival() if exact else Arrival(self.centres, self.chunk, self.first)
        return MagnitudeCache(batch, arriving, self.inner.new_cache(batch), rows=self.causal == "prefix")

    def attend_cached(self, inputs: Inputs, cache: Cache) -> Result:
        cache = of_kind(MagnitudeCache, cache)
        check_transforms("magnitude")
        cache.check(inputs.key)
        engine = inputs.options["engine"]
        compared = inputs.key if inputs.geometry_keys is None else inputs.geometry_keys
        plain = inputs.options["attn_mask"] is None and compared.shape[:-1] == inputs.key.shape[:-1]
        if plain and not cache.rows and not torch.is_grad_enabled() and self.beta is not None:
            # One call of compiled code for the gates and the gated values, once a chunk is under way.
            constants = cache.constants(self.log_t, self.beta, self.gamma, compared)
            gated = cache.arriving.gate(compared, inputs.value, self.eps, constants, engine)
            if gated is not None:
                cache.length += inputs.key.shape[2]
                return self._gated(inputs, *gated, cache)
        points = self._plain_points(compared, cache) if plain else self.new_points(inputs, cache.length)
        if 0 in points.x.shape[:2]:
            weights = points.x.detach().sum(-1)
        else:
            weights = cache.arriving.add(points.system(self.eps, engine).detach())
        cache.length += points.x.shape[1]
        if cache.rows:
            return self._attend_by_rows_cached(inputs, cache)
        return self._gated(inputs, self._gate(weights, points), None, cache)

    def _attend_by_rows_cached(self, inputs: Inputs, cache: MagnitudeCache) -> Result:
        """Attend to all keys, once the new ones have arrived, with gates of each row."""
        assert isinstance(cache.inner, KeyValueCache)
        whole = self.with_cached_tokens(inputs, cache.inner)
        if inputs.query.numel() == 0 or whole.key.numel() == 0:
            return self.attend(whole)
        window, rows = cache.arriving.window, inputs.query.shape[-2]
        # The last row is the one before the first new key, unless there are other queries than keys.
        before = cache.last_row if rows == inputs.key.shape[-2] else None
        weights = PrefixWeights(window.m, window.y)
        result, cache.last_row = self._by_rows(whole, weights, before, cache.length - rows)
        return result

    def _by_rows(
        self, inputs: Inputs, weights: PrefixWeights, before: Tensor | None, offset: int
    ) -> tuple[Result, Tensor]:
        engine = inputs.options["engine"]
        if engine not in ("auto", "dense"):
            raise ValueError(
                "magnitude: argument 'engine': causal='prefix' writes the weights of every row out, as"
                f" 'dense' does; {engine!r} does not"
            )
        return attend_by_rows(self, inputs, weights, before, offset)

    def _plain_points(self, key: Tensor, cache: MagnitudeCache) -> Points:
        """Return the same points for a call without masks, cheaply; the mechanism inside checks the call."""
        keys = key.detach().to(compute_dtype(key.dtype))
        root = cache.constants(self.log_t, self.beta, self.gamma, keys)[0]
        return Points((keys * root).flatten(0, 1), None, key.shape[:2])

    def gate(self, weights: Tensor) -> Tensor:
        """Return sigmoid(beta w + gamma), or the gate w itself, for weights (batch, key heads, ...)."""
        if self.beta is None or self.gamma is None:
            return weights if self.where == "values" else weights.relu()
        heads, more = weights.shape[1], (1,) * (weights.dim() - 2)
        beta, gamma = (
            by_key_head(x, heads).to(weights.dtype).view(-1, *more) for x in (self.beta, self.gamma)
        )
        return (beta * weights + gamma).sigmoid()

    def _gate(self, weights: Tensor, points: Points) -> Tensor:
        return self.gate(points.shaped(weights)).reshape(*points.leading, weights.shape[-1])

    def _gated(
        self, inputs: Inputs, gate: Tensor, value: Tensor | None = None, cache: MagnitudeCache | None = None
    ) -> Result:
        """Attend with one gate (batch, key heads, keys) for all rows. ``value``: the gated values, if
        known."""
        gate = gate.reshape(*inputs.key.shape[:-1])
        if isinstance(self.inner, MassGate):
            if cache is None:
                return self.inner.attend_gated(inputs, gate)
            return self.inner.attend_gated(inputs, gate, cache.inner, cache.all_gates(gate))
        wide = compute_dtype(inputs.value.dtype)
        if wide != inputs.value.dtype and cache is None:
            if isinstance(self.inner, Pointwise):
                return self.inner.attend_scaled(inputs, gate)
            # Gated values of half precision would be rounded once more, which peaked rows see in full.
            tensors = {name: getattr(inputs, name).to(wide) for name in ("query", "key", "value")}
            return inputs.rounded(self._gated(inputs.change(**tensors), gate))
        if value is None:
            value = gated_values(inputs.value, gate, inputs.options["engine"])
        gated = inputs.change(value=value)
        result = self.inner.attend(gated) if cache is None else self.inner.decode(gated, cache.inner)
        if not isinstance(result, tuple):
            return result
        if cache is not None:
            raise ValueError(
                "argument 'return_weights': with a cache the gates of earlier keys are in their values"
                " already"
            )
        every = result[1].shape[-3] // gate.shape[-2]
        return result[0], result[1] * gate.repeat_interleave(every, dim=-2)[..., None, :].to(result[1].dtype)


_SUMMARY = "a gate on every key from the geometry of the keys: near-duplicates count as one"
family(
    "magnitude",
    lambda layer_spec, base, **options: Magnitude(Pointwise(base, layer_spec), **options),
    summary=_SUMMARY,
    paper="Rosić 2026",
    properties=Properties(signed=False, row_sum=Interval(0, 1, open=True), l1=Interval(high=1, open=True)),
    base="softmax",
    takes=Magnitude,
)
modifier("magnitude", Magnitude, summary=_SUMMARY)
