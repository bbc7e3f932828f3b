"""The rule of stick-breaking: every key, from the last to the first, takes a share of what is left.

>>> Sticks().weights(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), {})     # sigmoid(0) = 1/2
tensor([[0.1250, 0.2500, 0.5000]])
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unsoft.engines.rows.rule import RowRule


class Sticks(RowRule):
    """a_j = sigmoid(s_j) * product over later keys of (1 - sigmoid(s))."""

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
