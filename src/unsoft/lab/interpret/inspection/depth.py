"""Do tokens become the same with depth? Measures of collapse of the residual stream, before and after each
block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsoft.measure import collapse
from unsoft.measure.states import Collapse


class Depths:
    """``add`` the streams of every batch, then ask for ``records``."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], Tensor] = {}
        self._count: dict[tuple[str, int], int] = {}
        self._inputs: dict[str, Tensor] = {}

    def add(
        self, stack: str, depth: int, states: Tensor, kept: list[Tensor | None], names: Tensor | None
    ) -> None:
        """States (batch, length, width); ``names`` are integer tokens (batch, length), if there are any."""
        if depth == 0:
            self._inputs[stack] = states
        if names is not None and names.shape != states.shape[:-1]:
            names = None
        for item, positions in enumerate(kept):

            def part(x: Tensor, item: int = item, positions: Tensor | None = positions) -> Tensor:
                return x[item] if positions is None else x[item][positions]

            tokens = None if names is None else part(names)
            looked = collapse(part(states), part(self._inputs[stack]), tokens=tokens)
            found = torch.stack([x.double().cpu() for x in looked if x is not None])
            place = (stack, depth)
            self._sums[place] = self._sums.get(place, 0.0) + found
            self._count[place] = self._count.get(place, 0) + 1

    def forget(self) -> None:
        """Lets go of the tensors of a batch."""
        self._inputs.clear()

    def records(self) -> list[dict[str, Any]]:
        """Means over sequences, one row for each depth: 0 is what enters the first block."""
        return [
            {"stack": stack, "depth": depth}
            | dict(zip(Collapse._fields, (sums / self._count[stack, depth]).tolist(), strict=True))
            for (stack, depth), sums in sorted(self._sums.items())
        ]
