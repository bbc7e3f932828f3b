"""What a row-coupled mechanism says of itself: how logits of a row become weights, in torch and in C++."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor

_readers: dict[str, Callable[[str], RowRule]] = {}


class RowRule(ABC):
    """One rule. The engines know nothing else about a mechanism of this shape."""

    kind: str
    """Tells the kinds of rules apart, at the beginning of their keys."""
    params: Mapping[str, float]
    """Names and default values of parameters, one value per head, sorted by name."""
    uses: frozenset[str]
    """Symbols that it looks at besides the logit: n and i have to be prepared."""

    def __init_subclass__(cls) -> None:
        _readers[cls.kind] = cls.read

    @property
    def key(self) -> str:
        """Everything that decides the numbers, as one line of text."""
        return f"{self.kind} {self.text()}"

    @staticmethod
    def from_key(key: str) -> RowRule:
        """The rule of a :attr:`key`."""
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
        """What tells it apart from other rules of its kind."""

    @classmethod
    @abstractmethod
    def read(cls, text: str) -> RowRule:
        """The inverse of :meth:`text`."""

    @abstractmethod
    def weights(self, logits: Tensor, visible: Tensor, symbols: Mapping[str, Tensor]) -> Tensor:
        """Weights (B, H, L, S) from finite logits and bool ``visible`` of that shape; any value where hidden.

        ``symbols``: i, n if it :attr:`uses` it, and the parameters, each broadcastable to the logits.
        """

    @abstractmethod
    def source(self) -> str:
        """C++ that defines ``unsoft_mechanism``; see engines/native/kernel/rows/panel.h."""
