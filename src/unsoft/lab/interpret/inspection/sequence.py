"""One sequence of a batch in one layer: what its heads saw, without padding."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unsoft.lab.interpret.inspection.observe import Seen
from unsoft.lab.interpret.inspection.visible import Visible, looks_back, visible_keys
from unsoft.lab.interpret.inspection.weights import softmax_rows, swapped_in, swapped_weights

_BLOCK = 2**18  # numbers in a block of rows of all heads, as in the measures
_LEAST_ROWS = 16


@dataclass(frozen=True)
class Sequence:
    """Tensors are (heads, n, dim), key heads may be fewer; all in float32 or wider."""

    query: Tensor
    key: Tensor
    value: Tensor
    content_keys: Tensor
    """The keys without rotary positions, where the model has these: clones are clones wherever they stand."""
    visible: Visible
    states: Tensor | None
    """(n, width)."""
    scale: float
    softcap: float | None
    dense: Tensor | None
    """(heads, n, n) of mechanisms whose rows cannot be computed one by one."""

    @property
    def heads(self) -> int:
        return len(self.query) if self.dense is None else len(self.dense)

    @property
    def per_key_head(self) -> int:
        """How many heads share the keys of one."""
        return self.heads // len(self.key)

    @property
    def length(self) -> int:
        return self.key.shape[-2]

    def row_blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """(numbers of rows, weights (heads, rows, keys), visible or None) over rows that see two keys or
        more.

        A row that sees a single key has no choice, so its numbers say nothing. ``keys`` can be fewer than n
        where the rest is hidden from all rows of the block.
        """
        first = 1 if self.visible.kind == "causal" or self.length == 1 else 0
        step = max(_LEAST_ROWS, _BLOCK // max(1, self.heads * self.length))
        for start in range(first, self.length, step):
            stop = min(start + step, self.length)
            table, keys = self.visible.rows(start, stop)
            weights = self._rows(start, stop, table, self.length if keys < 0 else keys)
            numbers = torch.arange(start, stop, device=weights.device)
            if self.visible.kind == "other" and table is not None:
                choice = (table.sum(-1) > 1).all(0)
                numbers, weights, table = numbers[choice], weights[:, choice], table[:, choice]
            yield numbers, weights, table

    def whole(self) -> Tensor:
        """All weights at once (heads, n, n), for short sequences."""
        weights = self._rows(0, self.length, self.visible.table, self.length)
        return weights if self.visible.table is None else torch.where(self.visible.table, weights, 0.0)

    def _rows(self, start: int, stop: int, table: Tensor | None, keys: int) -> Tensor:
        if self.dense is not None:
            return self.dense[:, start:stop, :keys]
        bias = None if self.visible.bias is None else self.visible.bias[:, start:stop, :keys]
        return softmax_rows(
            self.query[:, start:stop], self.key[:, :keys], self.scale, table, bias, self.softcap
        )


def sequences(seen: Seen, kept: list[Tensor | None]) -> Iterator[Sequence]:
    """The sequences of a batch; ``kept`` are the positions of each that are not padding, None if all are."""
    content = content_keys(seen)
    swapped = swapped_in(seen.module)
    for item, positions in enumerate(kept):

        def part(x: Tensor, item: int = item, positions: Tensor | None = positions) -> Tensor:
            x = x[item] if positions is None else x[item].index_select(-2, positions)
            return x.float() if x.dtype.itemsize < 4 else x

        visible = visible_keys(seen, item, positions)
        query, key, value = part(seen.query), part(seen.key), part(seen.value)
        dense = None
        if swapped is not None:
            dense = swapped_weights(swapped, query, key, value, visible, looks_back(seen), seen.scale)
        yield Sequence(
            query,
            key,
            value,
            part(content),
            visible,
            None if seen.states is None else part(seen.states),
            seen.scale,
            seen.options.get("softcap"),
            dense,
        )


def content_keys(seen: Seen) -> Tensor:
    """The keys as they were before the rotary embedding, or as they are if there was none.

    A rotation by the negative angle undoes it, in whatever way the model's own function pairs the dimensions.
    That the way back leads to the keys again is checked; if not, they stay as attention sees them.
    """
    rotate = getattr(sys.modules[type(seen.module).__module__], "apply_rotary_pos_emb", None)
    if seen.rotary is None or rotate is None:
        return seen.key
    try:
        cos, sin = seen.rotary
        _, content = rotate(seen.key, seen.key, cos, -sin)
        _, again = rotate(content, content, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # a function of the same name with other arguments
        return seen.key
    close = torch.allclose(again, seen.key, atol=1e-3 * float(seen.key.abs().max()), rtol=1e-2)
    return content if close else seen.key
