"""Attention with a gate for every key: on its value, on its mass, or different gates in every row.

A gate on the mass makes weights proportional to gate_j f(s_ij), for any mechanism that has a normaliser.
Formulas get the logarithm of the gate as a float mask that multiplies weight and mass; linear attention
carries the gate as one more column of the values and divides by it. Gates come from the geometry of the keys
(:func:`key_points`), and :class:`MagnitudeCache` keeps what decoding needs to compute those of new keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad
from torch.utils.checkpoint import checkpoint

from unsoft.engines.call import Call, compute_dtype
from unsoft.engines.gaussian import kernels_for
from unsoft.formula import Formula, parse
from unsoft.magnitude.points import Points
from unsoft.magnitude.streaming import Arrival
from unsoft.modules.cache import Cache, KeyValueCache
from unsoft.modules.module import Derived, Inputs, Mechanism, Result, Wrapper
from unsoft.tracing import transform_name

_EXPONENTIAL = parse("exp(s - m)")
ROWS = 128
"""Rows of a block of :func:`attend_by_rows`."""
_NO_NORMALISER = (
    "a factor on the mass of keys (density, and magnitude with where='mass') needs a mechanism with a"
    " normaliser; {} has none, and 'values' is the same for magnitude"
)


class MassGate(Wrapper):
    """A mechanism whose calls pass a gate on the mass of every key."""

    def __init__(self, inner: Mechanism) -> None:
        super().__init__(inner)
        if inner.mass_gate is None:
            raise ValueError(_NO_NORMALISER.format("this one"))
        self.by_column = inner.mass_gate == "column"
        inner.replace_formulas(_with_strength)

    def attend(self, inputs: Inputs) -> Result:
        return self.inner.attend(inputs)

    def attend_gated(
        self, inputs: Inputs, gate: Tensor, cache: Cache | None = None, gates: Tensor | None = None
    ) -> Result:
        """``gate`` (..., key heads, keys), or (..., key heads, rows, keys) if it differs from row to row.

        With a cache, ``gate`` belongs to the new keys and ``gates`` to all of them.
        """
        if self.by_column:
            return self._divided(inputs, gate, cache)
        log = _log(gate if gates is None else gates)
        return self.attend_log(inputs, log[..., None, :] if log.dim() < inputs.key.dim() else log, cache)

    def attend_log(self, inputs: Inputs, log: Tensor, cache: Cache | None = None) -> Result:
        """``log``: the logarithm of the gates, (..., heads or key heads, rows or 1, keys). With a cache it
        belongs to all keys."""
        if self.by_column:
            return self._divided(inputs, log.exp(), cache)
        log = log.repeat_interleave(inputs.query.shape[-3] // log.shape[-3], dim=-3)
        gated = inputs.with_options(attn_mask=_added(inputs.options["attn_mask"], log))
        return self.inner.attend(gated) if cache is None else self.inner.decode(gated, cache)

    def _divided(self, inputs: Inputs, gate: Tensor, cache: Cache | None) -> Result:
        if gate.dim() == inputs.key.dim():
            _, weights = self.inner.attend(inputs.change(return_weights=True))
            weights = weights * _for_heads(gate, weights).to(weights.dtype)
            weights = weights / _divisor(weights.sum(-1, keepdim=True))
            out = weighted_values(weights, inputs.value, inputs.options["dropout_p"])
            return (out, weights) if inputs.return_weights else out
        gate = gate[..., None].to(inputs.value.dtype)
        gated = inputs.change(
            value=torch.cat([inputs.value * gate, gate.expand(*inputs.value.shape[:-1], 1)], dim=-1)
        )
        result = self.inner.attend(gated) if cache is None else self.inner.decode(gated, cache)
        out = result[0] if isinstance(result, tuple) else result
        total = _divisor(out[..., -1:])
        if not isinstance(result, tuple):
            return out[..., :-1] / total
        return out[..., :-1] / total, result[1] * _for_heads(gate, result[1]).mT / total


def weighted_values(weights: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """Return weights (..., heads, rows, keys) times values (..., key heads, keys, width).

    A key that no row sees has no effect, even if its value is NaN.
    """
    value = _for_heads(value, weights)
    if not bool(value.isfinite().all()):
        value = torch.where((weights != 0).any(-2)[..., None], value, 0.0)
    return dropout(weights, dropout_p) @ value


def _for_heads(x: Tensor, weights: Tensor) -> Tensor:
    """Repeat a tensor of key heads for each head of the weights."""
    return x.repeat_interleave(weights.shape[-3] // x.shape[-3], dim=-3)


def _log(gate: Tensor) -> Tensor:
    """Return the logarithm of gates, finite also for a gate that underflows to 0."""
    return gate.clamp(min=torch.finfo(gate.dtype).tiny).log()


def _divisor(total: Tensor) -> Tensor:
    """Replace the total of rows that see nothing by 1: they then output 0, not NaN."""
    return torch.where(total > 0, total, 1.0)


def _with_strength(formula: Formula) -> Formula:
    if formula.mass is None:
        raise ValueError(_NO_NORMALISER.format(formula.name or formula.weight))
    # Added to the logit of softmax and its relatives, a mask multiplies weight and mass too.
    exponential = formula.weight == formula.mass == _EXPONENTIAL
    if formula.bias == "strength" or (exponential and formula.bias == "logit"):
        return formula
    return formula.change(bias="strength")


def _added(mask: Tensor | None, log: Tensor) -> Tensor:
    if mask is None:
        return log
    if mask.dtype == torch.bool:
        return torch.where(mask, log, -torch.inf)
    return mask.to(compute_dtype(mask.dtype)) + log


def gated_values(value: Tensor, gate: Tensor, engine: str) -> Tensor:
    """Return values (..., keys, width) times gates (..., keys), in the dtype of the values.

    A value that is not finite, as a masked key's may be, gives the gate no gradient.
    """
    tracing = torch.compiler.is_compiling()
    kernels = None if tracing else kernels_for(gate.flatten(0, -2)[..., None], engine)
    if kernels is not None and kernels.gated is not None:
        return kernels.gated(value, gate)
    gate = gate[..., None].to(value.dtype)
    if not gate.requires_grad:
        return value * gate
    finite = value.isfinite()
    if not tracing and bool(finite.all()):
        return value * gate
    return torch.where(finite, value, 0.0) * gate + torch.where(finite, 0.0, value)


class KeyGate(Wrapper):
    """A mechanism with a gate on every key, computed from a weight of the key in the geometry of all keys."""

    log_t: Tensor
    """(heads,) logarithm of the scale of squared distances."""

    @abstractmethod
    def gate(self, weights: Tensor) -> Tensor:
        """Return the gates of weights (batch, key heads, ...), for key heads or for heads."""

    def log_gate(self, weights: Tensor) -> Tensor:
        """Return the logarithm of :meth:`gate`."""
        return _log(self.gate(weights))

    def checked_call(self, inputs: Inputs) -> Call:
        """Return the checked call; its mask shows which keys are visible."""
        # Several queries for each head of the output share its key.
        grouped = inputs.options["enable_gqa"] or self.query_heads != self.layer_spec.heads
        return inputs.checked(enable_gqa=grouped, positions=None)[0]

    def new_points(self, inputs: Inputs, length: int) -> Points:
        """Return the points of the new keys of a decoding step, after ``length`` earlier ones."""
        new, mask = inputs.key.shape[-2], inputs.options["attn_mask"]
        if isinstance(mask, Tensor) and mask.shape[-1] == length + new:
            mask = mask[..., length:]  # which of the new keys are there?
        query = inputs.query[..., max(inputs.query.shape[-2] - new, 0) :, :]
        changed = inputs.change(query=query).with_options(attn_mask=mask, is_causal=True)
        return key_points(self.checked_call(changed), inputs, self.log_t)


def check_transforms(name: str) -> None:
    """Raise NotImplementedError inside a transform of torch.func or a forward-mode derivative."""
    if transform := transform_name():
        raise NotImplementedError(
            f"{name}: {transform} is not supported, since the geometry of keys has no rules for transforms"
            " and forward-mode derivatives; use torch.autograd.grad for gradients, and batch dimensions or a"
            " loop in place of vmap"
        )


class RowWeights(ABC):
    """The weights of keys in the prefix of every row, computed for a block of rows at a time."""

    @abstractmethod
    def before(self, keys: int) -> Tensor:
        """Return the weights (systems, all keys) in the prefix of the first ``keys`` keys; 0 after them."""

    @abstractmethod
    def block(self, first: int, seen: int, carry: Tensor) -> Tensor:
        """Return weights (systems, seen - first, seen): row r has those of the first ``first + r + 1`` keys.

        ``carry`` has those of the first ``first`` keys, as :meth:`before` does.
        """

    @abstractmethod
    def padded(self, more: int) -> RowWeights:
        """Return the weights with ``more`` absent keys after the last one."""


class PrefixWeights(RowWeights):
    """Magnitude weights of prefixes, from M (systems, keys, keys) and y (systems, keys); see prefix.py."""

    def __init__(self, m: Tensor, y: Tensor) -> None:
        self.m, self.y = m, y

    def before(self, keys: int) -> Tensor:
        if keys <= 0:
            return self.y.new_zeros(self.y.shape)
        return (self.y[:, :keys, None] * self.m[:, :keys]).sum(1)

    def block(self, first: int, seen: int, carry: Tensor) -> Tensor:
        new = slice(first, seen)
        steps = [carry[:, None, :seen], self.y[:, new, None] * self.m[:, new, :seen]]
        return torch.cat(steps, dim=1).cumsum(1)[:, 1:]

    def padded(self, more: int) -> PrefixWeights:
        return PrefixWeights(pad(self.m, (0, more, 0, more)), pad(self.y, (0, more)))


def attend_by_rows(
    layer: KeyGate, inputs: Inputs, weights: RowWeights, before: Tensor | None, offset: int
) -> tuple[Result, Tensor]:
    """Attend with gates of each row: row i has those of the first i + offset + 1 keys.

    Returns the result and the weights of the last row. Gates are computed a block of rows at a time and never
    kept. ``before`` are the weights of the prefix before the first row.
    """
    inputs = inputs.as_autocast()
    rows, keys = inputs.query.shape[-2], inputs.key.shape[-2]
    if rows + offset > keys:  # rows after the last key: fill up with keys that are masked
        more = rows + offset - keys
        result, last = attend_by_rows(
            layer, _with_masked_keys(inputs, more), weights.padded(more), before, offset
        )
        return (result[0], result[1][..., :keys]) if inputs.return_weights else result, last
    start = min(max(-offset, 0), rows)  # rows before the first key
    carry = weights.before(start + offset) if before is None else pad(before, (0, keys - before.shape[1]))
    parts = [_nothing(layer, inputs, start)]
    differentiable = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    for low in range(start, rows, ROWS):
        block = _Block(layer, inputs, weights, low, min(low + ROWS, rows), offset)
        *part, carry = checkpoint(block, carry, use_reentrant=False) if differentiable else block(carry)
        parts.append(part)
    joined = [torch.cat(part, dim=-2) for part in zip(*parts, strict=True)]
    return ((joined[0], joined[1]) if inputs.return_weights else joined[0]), carry


def _with_masked_keys(inputs: Inputs, more: int) -> Inputs:
    mask = inputs.options["attn_mask"]
    if mask is None:
        mask = torch.ones(inputs.key.shape[-2], dtype=torch.bool, device=inputs.key.device)[None]
    elif mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], inputs.key.shape[-2])
    mask = pad(mask, (0, more), value=False if mask.dtype == torch.bool else -torch.inf)
    key, value = (pad(x, (0, 0, 0, more)) for x in (inputs.key, inputs.value))
    options = inputs.options | {"attn_mask": mask}
    if options["positions"] is not None:
        options["positions"] = (options["positions"][0], pad(options["positions"][1], (0, more)))
    return inputs.change(key=key, value=value, options=options)


def _nothing(layer: KeyGate, inputs: Inputs, rows: int) -> list[Tensor]:
    """Return zeros for rows that see no key."""
    shape = (*inputs.query.shape[:-3], layer.layer_spec.heads, rows)
    out = inputs.query.new_zeros(*shape, inputs.value.shape[-1])
    return [out, inputs.query.new_zeros(*shape, inputs.key.shape[-2])] if inputs.return_weights else [out]


class _Block:
    """Rows low to high of :func:`attend_by_rows`."""

    def __init__(
        self, layer: KeyGate, inputs: Inputs, weights: RowWeights, low: int, high: int, offset: int
    ) -> None:
        self.layer, self.weights = layer, weights
        self.keys = inputs.key.shape[-2]
        self.first, self.seen = low + offset, high + offset
        options = dict(inputs.options)
        mask = options["attn_mask"]
        if mask is not None:
            mask = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., low:high, :]
            options["attn_mask"] = mask if mask.shape[-1] == 1 else mask[..., : self.seen]
        options["is_causal"] = "lower_right"
        if options["positions"] is not None:
            queries, keys = options["positions"]
            options["positions"] = queries[..., low:high], keys[..., : self.seen]
        self.inputs = inputs.change(
            query=inputs.query[..., low:high, :],
            key=inputs.key[..., : self.seen, :],
            value=inputs.value[..., : self.seen, :],
            hidden=None if inputs.hidden is None else inputs.hidden[..., low:high, :],
            options=options,
        )

    def __call__(self, carry: Tensor) -> tuple[Tensor, ...]:
        table = self.weights.block(self.first, self.seen, carry)
        more = (0, self.keys - self.seen)
        last = pad(table[:, -1], more)
        *leading, heads, _, _ = self.inputs.key.shape
        weights = table.reshape(-1, heads, *table.shape[1:])
        result = self._attend(weights, leading)
        return (result[0], pad(result[1], more), last) if isinstance(result, tuple) else (result, last)

    def _attend(self, weights: Tensor, leading: list[int]) -> Result:
        layer, inner, rows = self.layer, self.layer.inner, weights.shape[2:]
        if isinstance(inner, MassGate):
            return inner.attend_log(self.inputs, layer.log_gate(weights).reshape(*leading, -1, *rows))
        gate = layer.gate(weights).reshape(*leading, -1, *rows)
        p = self.inputs.options["dropout_p"]
        _, a = inner.attend(self.inputs.change(return_weights=True).with_options(dropout_p=0.0))
        a = a * _for_heads(gate, a).to(a.dtype)
        out = weighted_values(a, self.inputs.value, p)
        return (out, a) if self.inputs.return_weights else out


def key_points(call: Call, inputs: Inputs, log_t: Tensor) -> Points:
    """Return the scaled keys, or ``geometry_keys`` in their place; a key that no row may see, or that is not
    finite, counts as absent."""
    geometry = inputs.geometry_keys
    keys = call.k if geometry is None else _checked_geometry(geometry, inputs.key, call.k)
    present = seen_by_some_row(call)
    keys = keys.to(compute_dtype(keys.dtype))
    finite = keys.isfinite().all(-1)
    if torch.compiler.is_compiling() or not bool(finite.all()):
        present = finite if present is None else present & finite
        keys = torch.where(finite[..., None], keys, 0.0)
    if present is not None:
        keys = torch.where(present[..., None], keys, 0.0)
        present = present.expand(keys.shape[:-1]).flatten(0, 1)
    scale = key_scale(log_t, keys.shape[1], keys.shape[-1], keys.dtype)
    return Points((keys * scale).flatten(0, 1), present, keys.shape[:2])


def key_scale(log_t: Tensor, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return sqrt(t / d) of each key head, (heads, 1, 1)."""
    return (by_key_head(log_t, heads).to(dtype).exp() / width).sqrt()[:, None, None]


def by_key_head(parameter: Tensor, heads: int) -> Tensor:
    """Return one value for each key head: the mean of those of the query heads that share it."""
    if len(parameter) == heads:
        return parameter
    if heads == 0 or len(parameter) % heads:
        raise ValueError(f"argument 'key' has {heads} heads; the mechanism was made for {len(parameter)}")
    mean: Tensor = parameter.unflatten(0, (heads, -1)).mean(-1)
    return mean


def seen_by_some_row(call: Call) -> Tensor | None:
    """Return bool (B|1, Hk|1, S): True for keys that some row may see."""
    if call.visible is None:
        return None
    if call.visible.shape[2] > 1 and call.causal_offset is None:
        raise ValueError(
            "argument 'attn_mask' differs from row to row; the gates of keys would tell a row of"
            " keys that it must not see. Pass is_causal=True, or a mask of whole keys (..., 1, S)"
        )
    seen = call.visible.any(2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (call.k.shape[1], -1)).any(2)
    return seen


def _checked_geometry(keys: Tensor, key: Tensor, k: Tensor) -> Tensor:
    if not isinstance(keys, Tensor) or keys.shape[:-1] != key.shape[:-1]:
        got = tuple(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
        raise ValueError(
            f"argument 'geometry_keys' is {got}; expected a tensor (..., key heads, S, width) like"
            f" 'key', {tuple(key.shape)}"
        )
    return keys.expand(*key.shape[:-1], keys.shape[-1]).reshape(*k.shape[:3], keys.shape[-1])


class MagnitudeCache(Cache):
    """Made by ``Magnitude.new_cache``. ``rows``: every row has gates of its own, so keys and values are kept
    ungated.
    """

    def __init__(self, batch: int, arriving: Arrival, inner: Cache, *, rows: bool) -> None:
        super().__init__(batch)
        self.arriving, self.rows = arriving, rows
        self.inner = KeyValueCache(batch) if rows else inner
        self._constants = Derived()
        self.last_row: Tensor | None = None
        """Weights of all keys in the prefix that ended with the last token, if ``rows``."""
        self.gates: KeyValueCache | None = None
        """Where the mechanism needs the gates of earlier keys again."""

    @property
    def parts(self) -> tuple[Cache, ...]:
        return (self.inner,) if self.gates is None else (self.inner, self.gates)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        row = () if self.last_row is None else (self.last_row,)
        return (*super().tensors, *self.arriving.tensors, *row)

    @property
    def keeps_keys(self) -> bool:
        return self.inner.keeps_keys

    @property
    def holders(self) -> tuple[object, ...]:
        """A snapshot is valid until the next chunk of a streaming window begins, in the memory of the last
        one."""
        return (*super().holders, self.arriving, self.arriving.window)

    def constants(
        self, log_t: Tensor, beta: Tensor | None, gamma: Tensor | None, key: Tensor
    ) -> tuple[Tensor, ...]:
        """Return sqrt(t / d), (heads, 1, 1), and beta and gamma, (heads, 1), if there are any, of each key
        head; computed again only when a parameter has changed."""
        _, heads, _, width = key.shape
        dtype = compute_dtype(key.dtype)

        @torch.no_grad()
        def compute() -> tuple[Tensor, ...]:
            learned = (x for x in (beta, gamma) if x is not None)
            gate = (by_key_head(x, heads).to(dtype)[:, None] for x in learned)
            return key_scale(log_t, heads, width, dtype), *gate

        constants: tuple[Tensor, ...] = self._constants.get(
            compute, (heads, width, dtype), log_t, beta, gamma
        )
        return constants

    def all_gates(self, new: Tensor) -> Tensor | None:
        """Append the gates of new keys and return those of all keys; None if the mechanism inside keeps no
        keys either."""
        if not self.keeps_keys:
            return None
        if self.gates is None:
            self.gates = KeyValueCache(self.batch)
        gates, _ = self.gates.append(new[..., None], new[..., None][..., :0])  # a key one wide, and no value
        return gates[..., 0]

    def reorder(self, index: Tensor) -> None:
        arrived = self.arriving.tensors
        if arrived:
            heads = len(arrived[0]) // self.batch
            systems = (index[:, None] * heads + torch.arange(heads, device=index.device)).flatten()
            self.arriving.pick(systems)
            self.last_row = None if self.last_row is None else self.last_row[systems]
        super().reorder(index)
