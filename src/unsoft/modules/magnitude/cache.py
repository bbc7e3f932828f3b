"""What decoding with a magnitude gate remembers: the geometry of the keys so far, and the cache of the
mechanism inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.call import compute_dtype
from unsoft.magnitude.streaming import ExactArrival, StreamedArrival
from unsoft.modules.cache import Cache, KeyValueCache
from unsoft.modules.magnitude.points import by_key_head, key_scale


class MagnitudeCache(Cache):
    """Made by ``Magnitude.new_cache``. ``rows``: every row has gates of its own, so keys and values are kept
    ungated.
    """

    def __init__(
        self, batch: int, arriving: ExactArrival | StreamedArrival, inner: Cache, *, rows: bool
    ) -> None:
        super().__init__(batch)
        self.arriving, self.rows = arriving, rows
        self.inner = KeyValueCache(batch) if rows else inner
        self._constants: tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] | None = None
        """What was computed from the mechanism's parameters, and which parameters those were."""
        self.last_row: Tensor | None = None
        """Weights of all keys in the prefix that ended with the last token, if ``rows``."""
        self.gates: KeyValueCache | None = None
        """Where the mechanism needs the gates of earlier keys again."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        row = () if self.last_row is None else (self.last_row,)
        gates = () if self.gates is None else self.gates.tensors
        return (*self.inner.tensors, *self.arriving.tensors, *row, *gates)

    @property
    def keeps_keys(self) -> bool:
        return self.inner.keeps_keys

    @property
    def holders(self) -> tuple[object, ...]:
        """A snapshot holds until the next chunk of a streaming window begins, in the memory of
        the last one.
        """
        gates = () if self.gates is None else self.gates.holders
        return (self, self.arriving, self.arriving.window, *self.inner.holders, *gates)

    def constants(
        self, log_t: Tensor, beta: Tensor, gamma: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """sqrt(t / d), (heads, 1, 1), and beta and gamma, (heads, 1), of each key head; computed again only
        when a parameter has changed.
        """
        parameters = (log_t, beta, gamma)
        _, heads, _, width = key.shape
        stamp = (heads, width, *(x.data_ptr() for x in parameters), *(x._version for x in parameters))
        if self._constants is None or self._constants[0] != stamp:
            with torch.no_grad():
                dtype = compute_dtype(key.dtype)
                slope, offset = (by_key_head(x, heads).to(dtype)[:, None] for x in (beta, gamma))
                self._constants = stamp, (key_scale(log_t, heads, width, dtype), slope, offset)
        return self._constants[1]

    def all_gates(self, new: Tensor) -> Tensor | None:
        """The gates of all keys, once those of the new keys are added; None where the mechanism inside keeps
        no keys either.
        """
        if not self.keeps_keys:
            return None
        if self.gates is None:
            self.gates = KeyValueCache(self.batch)
        gates, _ = self.gates.append(new[..., None], new[..., None][..., :0])  # a key one wide, and no value
        return gates[..., 0]

    def reorder(self, index: Tensor) -> None:
        self.inner.reorder(index)
        held = self.arriving.tensors
        if held:
            heads = len(held[0]) // self.batch
            systems = (index[:, None] * heads + torch.arange(heads, device=index.device)).flatten()
            self.arriving.pick(systems)
            self.last_row = None if self.last_row is None else self.last_row[systems]
        if self.gates is not None:
            self.gates.reorder(index)
        self.batch = len(index)
