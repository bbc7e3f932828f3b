"""Cache of the magnitude mechanism, and the points that the geometry of the keys is taken from."""

from __future__ import annotations

import torch
from torch import Tensor

from unsoft.engines.call import Call, compute_dtype
from unsoft.magnitude.points import Points
from unsoft.magnitude.streaming import ExactArrival, StreamedArrival
from unsoft.modules.cache import Cache, KeyValueCache
from unsoft.modules.module import Inputs


def key_points(call: Call, inputs: Inputs, log_t: Tensor) -> Points:
    """Return the scaled keys, or ``geometry_keys`` in their place; a key that no row may see, or that is not
    finite, counts as absent."""
    geometry = inputs.geometry_keys
    keys = call.k if geometry is None else _checked_geometry(geometry, inputs.key, call.k)
    present = _seen_by_some_row(call)
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
        raise ValueError(
            f"magnitude: argument 'key' has {heads} heads; the mechanism was made for {len(parameter)}"
        )
    mean: Tensor = parameter.unflatten(0, (heads, -1)).mean(-1)
    return mean


def _seen_by_some_row(call: Call) -> Tensor | None:
    """Return bool (B|1, Hk|1, S): True for keys that some row may see."""
    if call.visible is None:
        return None
    if call.visible.shape[2] > 1 and call.causal_offset is None:
        raise ValueError(
            "magnitude: argument 'attn_mask' differs from row to row; the gates of keys would tell a row of"
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
            f"magnitude: argument 'geometry_keys' is {got}; expected a tensor (..., key heads, S, width) like"
            f" 'key', {tuple(key.shape)}"
        )
    return keys.expand(*key.shape[:-1], keys.shape[-1]).reshape(*k.shape[:3], keys.shape[-1])


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
        """Values computed from the mechanism's parameters, and the state of these parameters."""
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
        """A snapshot is valid until the next chunk of a streaming window begins, in the memory of the last
        one."""
        gates = () if self.gates is None else self.gates.holders
        return (self, self.arriving, self.arriving.window, *self.inner.holders, *gates)

    def constants(
        self, log_t: Tensor, beta: Tensor, gamma: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return sqrt(t / d), (heads, 1, 1), and beta and gamma, (heads, 1), of each key head; computed again
        only when a parameter has changed."""
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
        """Append the gates of new keys and return those of all keys; None if the mechanism inside keeps no
        keys either."""
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
