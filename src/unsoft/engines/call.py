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

    A formula, a :class:`unsoft.engines.rows.rule.RowRule`, or plain :class:`Needs`.
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

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.q.dtype)

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

    def flat(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        """Return the tensors of :data:`TENSORS` and the other fields, in types that torch operators take."""
        options = {
            "rule": self.rule.key,
            "causal_offset": self.causal_offset,
            "scale": self.scale,
            "dropout_p": self.dropout_p,
        }
        return tuple(getattr(self, name) for name in TENSORS), options

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


class Rows(NamedTuple):
    """Result of a forward pass: the output (B, H, L, Dv), and per row the peak and the total mass (B, H, L).
    The peak is 0 for formulas without one, and -inf in rows that see no key."""

    out: Tensor
    peak: Tensor
    total: Tensor

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


class Gradients(NamedTuple):
    """Result of a backward pass; all but q, k and v are empty unless needed."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    params: Tensor
    query_fields: Tensor
    key_fields: Tensor


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
