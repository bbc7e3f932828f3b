"""Rules that turn the logits of a row into weights, in torch and in C++; and their specification,
:func:`dense_rows`, on whole matrices of logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unsoft.engines.call import Call
from unsoft.engines.dense import dense_logits, weighted_values
from unsoft.formula.arguments import NO_SYMBOLS

_readers: dict[str, Callable[[str], RowRule]] = {}


class RowRule(ABC):
    """One rule: all that the engines need to know about a row-coupled mechanism."""

    kind: str
    """Name of this kind of rules, at the beginning of their keys."""
    params: Mapping[str, float]
    """Names and default values of parameters, one value per head, sorted by name."""
    uses: frozenset[str]
    """{"n"} if it uses the number of visible keys; the row i is always there."""
    fields: Mapping[str, str] = MappingProxyType({})
    symbols = NO_SYMBOLS

    def __init_subclass__(cls) -> None:
        _readers[cls.kind] = cls.read

    @property
    def key(self) -> str:
        """Everything that decides the numbers, as one line of text."""
        return f"{self.kind} {self.text()}"

    @staticmethod
    def from_key(key: str) -> RowRule:
        """Return the rule of a :attr:`key`."""
        kind, _, text = key.partition(" ")
        return _readers[kind](text)

    def __reduce__(self) -> tuple[Callable[[str], RowRule], tuple[str]]:
        return RowRule.from_key, (self.key,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowRule) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @abstractmethod
    def text(self) -> str:
        """Return what distinguishes it from other rules of its kind."""

    @classmethod
    @abstractmethod
    def read(cls, text: str) -> RowRule:
        """Return the rule of a :meth:`text`."""

    @abstractmethod
    def weights(self, logits: Tensor, visible: Tensor, symbols: Mapping[str, Tensor]) -> Tensor:
        """Return weights (B, H, L, S) from finite logits and bool ``visible`` of that shape; any value where
        hidden.

        ``symbols``: i, n if it :attr:`uses` it, and the parameters, each broadcastable to the logits.
        """

    @abstractmethod
    def source(self) -> str:
        """Return C++ that defines ``unsoft_mechanism``; see engines/native/kernel/rows/panel.h."""


class Sticks(RowRule):
    """Stick-breaking: a_j = sigmoid(s_j) * product over later keys of (1 - sigmoid(s)).

    Every key, from the last to the first, takes a share of what is left.

    >>> Sticks().weights(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), {})     # sigmoid(0) = 1/2
    tensor([[0.1250, 0.2500, 0.5000]])
    """

    kind = "sticks"
    params: Mapping[str, float] = MappingProxyType({})
    uses = frozenset[str]()

    def text(self) -> str:
        return ""

    @classmethod
    def read(cls, text: str) -> Sticks:
        return cls()

    def weights(self, logits: Tensor, visible: Tensor, symbols: Mapping[str, Tensor]) -> Tensor:
        logits = torch.where(visible, logits, 0.0)
        left = torch.where(visible, logsigmoid(-logits), 0.0)
        later = left.flip(-1).cumsum(-1).flip(-1) - left
        return torch.where(visible, (logsigmoid(logits) + later).exp(), 0.0)

    def source(self) -> str:
        return '#include "rows/sticks.h"\n'


def dense_rows(call: Call) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, L, Dv) and the weights (B, H, L, S) before dropout, in the dtype of the
    inputs."""
    rule = call.rule
    if not isinstance(rule, RowRule):
        raise TypeError(f"a rule of rows is needed, not {type(rule).__name__}")
    logits, visible = dense_logits(call)
    symbols = {name: row[:, None, None] for name, row in zip(sorted(rule.params), call.params, strict=True)}
    rows = torch.arange(logits.shape[2], dtype=logits.dtype, device=logits.device)
    symbols["i"] = (rows + (call.causal_offset or 0))[:, None]
    if call.counts is not None:
        symbols["n"] = call.counts[..., None]
    weights = torch.where(visible, rule.weights(logits, visible, symbols), 0.0)
    return weighted_values(call, weights, visible)
