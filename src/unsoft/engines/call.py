"""One attention call after every argument has been checked: the only input of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from unsoft.formula import Formula
from unsoft.formula.arguments import NO_SYMBOLS, Symbols


class CallRule(Protocol):
    """Definition of the weights of a call, with the inputs that have to be prepared for it.

    A formula, a :class:`unsoft.engines.rows.rules.RowRule`, or plain :class:`Needs`.
    """

    @property
    def uses(self) -> AbstractSet[str]:
        """Symbols; "n" needs the counts of visible keys, "i" and "j" the positions."""

    @property
    def params(self) -> Mapping[str, float]:
        """Names and default values of parameters."""

    @property
    def fields(self) -> Mapping[str, str]:
        """Names of declared fields, and whether they belong to queries, keys or both."""

    @property
    def symbols(self) -> Symbols:
        """Symbols of fields, in the order of ``Call.query_fields`` and ``Call.key_fields``."""

    @property
    def key(self) -> str:
        """Everything that decides the numbers, as one line of text."""


@dataclass(frozen=True)
class Needs:
    """The inputs that a mechanism needs which is neither a formula nor a rule of rows; by default none."""

    uses: AbstractSet[str] = frozenset()
    params: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    symbols: Symbols = NO_SYMBOLS
    key: str = ""


NO_NEEDS = Needs()


@dataclass(frozen=True)
class Call:
    """A checked call in one fixed layout.

    Legend: B batch, H query heads, Hk key/value heads (H is a multiple of Hk, query head h reads key head
    h // (H // Hk)), L queries, S keys, D and Dv head dimensions, P formula parameters; "B|1" = may be 1,
    meaning the same for all. ``compute_dtype`` is float64 for float64 inputs and float32 for all others.
    """

    q: Tensor
    """(B, H, L, D)"""
    k: Tensor
    """(B, Hk, S, D)"""
    v: Tensor
    """(B, Hk, S, Dv)"""
    rule: CallRule
    params: Tensor
    """(P, H) in compute_dtype, one row per name of ``rule.params``, sorted by name."""
    visible: Tensor | None = None
    """Bool (B|1, H|1, L|1, S|1), False = masked; None = no mask."""
    bias: Tensor | None = None
    """Additive mask, same shapes, compute_dtype, with masked entries 0; None = no additive mask."""
    causal_offset: int | None = None
    """Key j is visible to row i only if j <= i + causal_offset; None = not causal."""
    spans: Tensor | None = None
    """int32 (B|1, L, 2): the first key that a row may see and one past the last; windows, documents, padding
    and ``causal_offset`` together. None = the causal rule alone."""
    counts: Tensor | None = None
    """(B|1, H|1, L) visible keys of each row, at least 1, compute_dtype; present iff the rule uses ``n``."""
    positions: Tensor | None = None
    """(B|1, L + S) the symbols i of all queries, then j of all keys, compute_dtype; present only if the rule
    uses them. None = rows count from ``causal_offset`` and keys from 0."""
    query_fields: Tensor | None = None
    """(F, B, H, L) in compute_dtype, one for each name of ``rule.symbols.query``; None = there is none."""
    key_fields: Tensor | None = None
    """(F, B, H or Hk, S) likewise for ``rule.symbols.key``; with Hk heads, query heads share them as they
    share keys."""
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: Tensor | None = None
    """Two words (see dropout.py); present iff dropout_p > 0."""
    strict: bool = False
    """True: the engine was requested by name. It raises if its kernel fails, where it would otherwise warn
    and leave the call to another engine."""
    wide: bool = False
    """True: the output is in compute_dtype, for callers that compute further and round once at the end."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.q.dtype)

    @property
    def out_dtype(self) -> torch.dtype:
        return self.compute_dtype if self.wide else self.q.dtype

    @property
    def formula(self) -> Formula:
        """The rule of a call of a formula."""
        if not isinstance(self.rule, Formula):
            raise TypeError(f"a formula is needed, not {type(self.rule).__name__}")
        return self.rule

    def spread_key_fields(self) -> Tensor | None:
        """Return the fields of keys for every query head, (F, B, H, S)."""
        if self.key_fields is None or self.key_fields.shape[2] == self.q.shape[1]:
            return self.key_fields
        return self.key_fields.repeat_interleave(self.q.shape[1] // self.key_fields.shape[2], dim=2)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute: no output, or no key that a row could see."""
        return 0 in (*self.q.shape[:3], self.k.shape[2], self.v.shape[3])

    def row_symbols(self) -> dict[str, Tensor]:
        """Return i, n, the parameters and the fields of queries by name, each broadcastable to (B, H, L).

        NaN and Inf in fields are replaced by 0; the engines add NaN to the rows that see them.
        """
        length = self.q.shape[2]
        if self.positions is None:
            rows = torch.arange(length, dtype=self.compute_dtype, device=self.q.device)
            i = (rows + (self.causal_offset or 0))[None, None]
        else:
            i = self.positions[:, None, :length]
        symbols = {"i": i} if self.counts is None else {"i": i, "n": self.counts}
        symbols |= zip(sorted(self.rule.params), self.params[:, None, :, None], strict=True)
        if self.query_fields is not None:
            symbols |= zip(self.rule.symbols.query, finite_part(self.query_fields), strict=True)
        return symbols

    def key_symbols(self) -> dict[str, Tensor]:
        """Return j, if the rule uses it, and the fields of keys likewise, each broadcastable to (B, H, S)."""
        symbols, (length, keys) = {}, (self.q.shape[2], self.k.shape[2])
        if "j" in self.rule.uses and self.positions is None:
            symbols["j"] = torch.arange(keys, dtype=self.compute_dtype, device=self.q.device)[None, None]
        elif "j" in self.rule.uses and self.positions is not None:
            symbols["j"] = self.positions[:, None, length:]
        fields = self.spread_key_fields()
        if fields is not None:
            symbols |= zip(self.rule.symbols.key, finite_part(fields), strict=True)
        return symbols

    def flat(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """Return the tensors of :data:`TENSORS` and the other fields, in types that torch operators take."""
        options = {name: getattr(self, name) for name in OPTIONS}
        return self.tensors, {"rule": self.rule.key, **options}

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields of :data:`TENSORS`."""
        return tuple(getattr(self, name) for name in TENSORS)

    @classmethod
    def from_flat(
        cls,
        tensors: Sequence[Tensor | None],
        read: Callable[[str], CallRule] = Formula.from_key,
        *,
        rule: str,
        **options: Any,
    ) -> Call:
        """Return the call that :meth:`flat` was made of; ``read`` makes the rule from its key."""
        fields: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
        return cls(rule=read(rule), **fields, **options)


TENSORS = (
    *("q", "k", "v", "visible", "bias", "counts", "positions", "params", "seed"),
    *("query_fields", "key_fields", "spans"),
)
"""The fields of a call that are tensors, in the order in which operators take them."""
OPTIONS = ("causal_offset", "scale", "dropout_p", "strict", "wide")
"""The others, besides the rule."""


class Rows(NamedTuple):
    """Result of a forward pass: the output (B, H, L, Dv), and per row the peak and the total mass (B, H, L).
    The peak is 0 for formulas without one, and -inf in rows that see no key."""

    out: Tensor
    peak: Tensor
    total: Tensor

    @classmethod
    def empty(cls, q: Tensor, v: Tensor, wide: bool = False) -> Rows:
        """Return uninitialised results for queries and values; ``wide``: see :class:`Call`."""
        row = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
        out = (row if wide else q).new_empty(*q.shape[:3], v.shape[3])
        return cls(out, row, torch.empty_like(row))

    def of_no_keys(self) -> Rows:
        """Fill in the results of rows without any key."""
        return Rows(self.out.zero_(), self.peak.zero_(), self.total.fill_(1))

    def live_peak(self) -> tuple[Tensor, Tensor]:
        """Return which rows see any key, and the peak with 0 in the others: the symbol m."""
        live = self.peak != -torch.inf
        return live, torch.where(live, self.peak, 0.0)


class Upstream(NamedTuple):
    """Inputs of a backward pass besides the call."""

    grad_out: Tensor
    rows: Rows
    need_bias: bool
    need_params: bool
    need_query_fields: bool = False
    need_key_fields: bool = False

    def optional_gradients(self, call: Call, bias_shape: Sequence[int]) -> OptionalGradients:
        """Return zeros for the gradients that are needed; that of the bias is added up in ``bias_shape``."""
        new, (batch, heads, length, _) = call.params.new_zeros, call.q.shape
        query, key = call.rule.symbols
        return OptionalGradients(
            new(tuple(bias_shape)) if self.need_bias and call.bias is not None else None,
            torch.zeros_like(call.params) if self.need_params else None,
            new(len(query), batch, heads, length) if self.need_query_fields else None,
            new(len(key), batch, heads, call.k.shape[2]) if self.need_key_fields else None,
        )


class OptionalGradients(NamedTuple):
    """Gradients that are computed only if needed, as engines add them up; None = not needed."""

    bias: Tensor | None
    """(B, H, L, S), or the shape of the bias."""
    params: Tensor | None
    """(P, H)"""
    query_fields: Tensor | None
    """(F, B, H, L)"""
    key_fields: Tensor | None
    """(F, B, H, S), for every query head."""


class Gradients(NamedTuple):
    """Result of a backward pass; all but q, k and v are empty unless needed."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    params: Tensor
    query_fields: Tensor
    key_fields: Tensor

    @classmethod
    def finished(cls, call: Call, q: Tensor, k: Tensor, v: Tensor, optional: OptionalGradients) -> Gradients:
        """Return all gradients in the shapes of the inputs."""
        bias, params, query_fields, key_fields = optional
        if bias is not None and call.bias is not None:
            bias = bias.sum_to_size(call.bias.shape)
        shared = None if call.key_fields is None else call.key_fields.shape[2]
        if key_fields is not None and shared not in (None, key_fields.shape[2]):
            # Query heads that share a field of keys add to one gradient.
            key_fields = key_fields.unflatten(2, (shared, -1)).sum(3)
        # Each empty one is its own tensor: outputs of an operator must not share memory.
        others = (
            call.params.new_empty(0) if x is None else x for x in (bias, params, query_fields, key_fields)
        )
        return cls(q, k, v, *others)

    def where_finite(self, call: Call, names: Sequence[str]) -> Gradients:
        """Return the gradients with 0 for entries of the inputs ``names`` that are NaN or Inf. Such an entry
        counts as the constant 0, with NaN added to what sees it."""
        inputs = {name: getattr(call, name) for name in names if getattr(self, name).numel()}
        return self._replace(
            **{
                name: torch.where(x.isfinite(), getattr(self, name), 0.0)
                for name, x in inputs.items()
                if x is not None
            }
        )


def named_rows(table: Tensor | None, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Return the rows of a table of gradients with their names; none if it is not needed."""
    return [] if table is None else list(zip(names, table, strict=True))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic: float64 stays, everything narrower is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite_part(x: Tensor) -> Tensor:
    """Return the tensor with NaN and Inf replaced by 0, in value and in gradient."""
    return torch.where(x.isfinite(), x, 0.0)


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Return True if a tensor of this shape can be expanded to ``target``.

    >>> broadcasts((1, 5), (2, 3, 5)), broadcasts((2, 5), (2, 3, 5))
    (True, False)
    """
    pairs = zip(shape[::-1], target[::-1], strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    """Raise ValueError unless the argument ``x`` is on the device of the query."""
    if x.device != device:
        raise ValueError(
            f"attention: argument '{name}' is on device {x.device}, 'query' is on {device}; they must match"
        )
