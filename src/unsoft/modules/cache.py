"""Caches: what decoding keeps between calls.

A cache belongs to one layer. It is made by ``mechanism.new_cache(batch)``, filled by
``mechanism(q, k, v, cache=cache)`` and has a ``length`` (tokens seen) and ``nbytes`` (memory held).
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from unsoft.engines.native.step import Field, Step, dequantised, prepare_step, quantised
from unsoft.formula import Formula

_FIRST_CAPACITY = 64
Snapshot = list[tuple[object, dict[str, Any]]]


class Cache:
    """Common to all caches: the batch size it was made for, the number of tokens it has seen,
    the bytes it holds."""

    only_keys_and_values: ClassVar[bool] = False
    """True if it holds keys and values and nothing else, so that any other cache of those will do."""
    held: ClassVar[tuple[str, ...]] = ()
    """Its attributes that are a tensor with the batch as its first dimension, or None."""

    def __init__(self, batch: int) -> None:
        if not isinstance(batch, int) or isinstance(batch, bool):
            raise TypeError(f"new_cache: argument 'batch' must be a whole number, not {type(batch).__name__}")
        if batch < 0:
            raise ValueError(f"new_cache: argument 'batch' must not be negative, not {batch}")
        self.batch, self.length = batch, 0

    def quantise(self, dtype: str = "int8") -> Cache:
        """Store what is appended from now on as ``dtype``, and return the cache, which must be empty.

        Raise ValueError unless this cache supports it: only those of keys and values and nothing else do.
        """
        raise ValueError(
            f"argument 'dtype': {type(self).__name__} cannot be stored as {dtype!r}; a quantised cache is for"
            " mechanisms that keep keys and values only, such as softmax and cog"
        )

    @property
    def parts(self) -> tuple[Cache, ...]:
        """The caches inside it, of the same sequences."""
        return ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the cache and those inside it."""
        own = (getattr(self, name) for name in self.held)
        return (*(x for x in own if x is not None), *(x for part in self.parts for x in part.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return sum(x.numel() * x.element_size() for x in self.tensors)

    def check(self, key: Tensor) -> None:
        """Raise ValueError unless a key tensor (batch, heads, length, dim) fits this cache."""
        if key.dim() != 4 or key.shape[0] != self.batch:
            raise ValueError(
                f"argument 'key' has shape {tuple(key.shape)}; the cache was made for (batch, heads, length,"
                f" dim) with a batch of {self.batch}"
            )

    @property
    def keeps_keys(self) -> bool:
        """True if the cache holds every key, so that a mask can still hide some of them."""
        return self.only_keys_and_values

    @property
    def holders(self) -> tuple[object, ...]:
        """The cache and the objects inside it that change from token to token."""
        return (self, *(holder for part in self.parts for holder in part.holders))

    def snapshot(self) -> Snapshot:
        """Return a state that :meth:`restore` takes. Nothing is copied: buffers are only written behind their
        end.

        >>> cache = KeyValueCache(batch=1)
        >>> before = cache.snapshot()
        >>> _ = cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5))
        >>> cache.restore(before)
        >>> cache.length
        0
        """
        return [(holder, dict(vars(holder))) for holder in self.holders]

    def restore(self, before: Snapshot) -> None:
        """Drop the tokens since a snapshot of this cache; repeatable, to try several continuations in
        turn."""
        for holder, content in before:
            vars(holder).update(content)

    def reorder(self, index: Tensor) -> None:
        """Move sequence ``index[b]`` to position b, as beam search does between steps."""
        for name in self.held:
            x = getattr(self, name)
            setattr(self, name, None if x is None else x[index])
        for part in self.parts:
            part.reorder(index)
        self.batch = len(index)


Kind = TypeVar("Kind", bound=Cache)


def of_kind(kind: type[Kind], cache: Cache) -> Kind:
    """Return ``cache``; raise TypeError unless it is of this kind."""
    if not isinstance(cache, kind):
        raise TypeError(
            f"argument 'cache' is a {type(cache).__name__}; this mechanism's new_cache() makes another kind"
        )
    return cache


class KeyValueCache(Cache):
    """All keys and values so far, in buffers that double when they are full.

    After :meth:`quantise` they are stored as int8, one scale for each head of a token, and read as what is
    stored: attention sees the same keys in a whole prompt, in chunks and token by token.

    >>> cache = KeyValueCache(batch=1)
    >>> keys, values = cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5))
    >>> keys, values = cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 5))
    >>> keys.shape, values.shape, cache.length
    (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 4, 5]), 4)
    """

    only_keys_and_values = True
    held = ("_keys", "_values")

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.is_quantised = False
        self._like: tuple[Tensor, Tensor] | None = None
        """No keys and no values, in the layout and dtype of those that come."""
        self.step: Step | None = None
        """The last step of decoding, prepared to be repeated."""

    def quantise(self, dtype: str = "int8") -> Cache:
        if type(self) is not KeyValueCache:
            return super().quantise(dtype)
        if dtype != "int8":
            raise ValueError(f"argument 'dtype' must be 'int8', not {dtype!r}")
        if self.length:
            raise ValueError(f"quantise: the cache holds {self.length} tokens already; call it on a new one")
        self.is_quantised = True
        return self

    @property
    def buffers(self) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values, with room for more behind the first ``length`` of them."""
        return self._keys, self._values

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; return those of all tokens, as the cache lays them out."""
        self.check(key)
        if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
            raise ValueError(
                f"argument 'value' has shape {tuple(value.shape)}, 'key' has {tuple(key.shape)}; batch, heads"
                " and length must match"
            )
        value = self._laid_out(value)
        if self._like is None:
            self._like = _none_like(key), _none_like(value)
        for name, new, like in zip(("key", "value"), (key, value), self._like, strict=True):
            _check_fits(name, new, like)
        if self.is_quantised:
            if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
                raise ValueError("an int8 cache passes no gradient on; decode inside torch.no_grad()")
            key, value = quantised(key), quantised(value)
        end = self.length + key.shape[2]
        self._keys = self._appended(self._keys, key, end)
        self._values = self._appended(self._values, value, end)
        self.length = end
        return self._stored()

    def _stored(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, as the cache lays them out."""
        assert self._keys is not None and self._values is not None and self._like is not None
        keys, values = (x.narrow(2, 0, self.length) for x in (self._keys, self._values))
        if not self.is_quantised:
            return keys, values
        key, value = self._like
        return dequantised(keys, key.shape[3], key.dtype), dequantised(values, value.shape[3], value.dtype)

    def _laid_out(self, value: Tensor) -> Tensor:
        """Return values (batch, heads, tokens, width) in the layout of the buffer."""
        return value

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, (batch, heads, length, width)."""
        return self._stored()

    def step_by(
        self,
        formula: Formula,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        enable_gqa: bool,
        field: Field | None = None,
    ) -> Tensor | None:
        """Append and attend by one call of compiled code; None, with nothing appended, if it cannot."""
        buffers = self.buffers
        step = self.step
        if step is None or not step.serves(formula, buffers, (scale, enable_gqa), field):
            step = self.step = prepare_step(query, key, value, formula, scale, enable_gqa, buffers, field)
            if step is None:
                return None
        out = step.run(query, key, value, self.length, field)
        if out is None:
            self.step = None  # inputs of another shape, or a full buffer
        else:
            self.length += key.shape[2]
        return out

    def _appended(self, buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
        if buffer is not None and torch.is_grad_enabled() and (new.requires_grad or buffer.requires_grad):
            # Writing in place would cut the graph.
            return torch.cat([buffer[:, :, : self.length], new], dim=2)
        if buffer is None or buffer.shape[2] < end:
            larger = new.new_empty(*new.shape[:2], max(2 * end, _FIRST_CAPACITY), new.shape[3])
            if buffer is not None:
                larger[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = larger
        buffer.narrow(2, self.length, end - self.length).copy_(new)
        return buffer


def _none_like(x: Tensor) -> Tensor:
    """Return no tokens in the layout of these."""
    return x.new_empty(*x.shape[:2], 0, x.shape[3])


def _check_fits(name: str, new: Tensor, held: Tensor) -> None:
    """Raise ValueError or TypeError unless new tokens have the heads, width and dtype of those in the
    cache."""
    if new.dim() != 4 or (new.shape[1], new.shape[3]) != (held.shape[1], held.shape[3]):
        raise ValueError(
            f"argument '{name}' has shape {tuple(new.shape)}; the cache holds {held.shape[1]} heads of width"
            f" {held.shape[3]}"
        )
    if new.dtype != held.dtype:
        raise TypeError(f"argument '{name}' has dtype {new.dtype}; the cache holds {held.dtype}")


class StateCache(Cache):
    """A state of fixed size, whatever the length: linear attention."""

    held = ("state", "seen")

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.state: Tensor | None = None
        self.seen: Tensor | None = None
        """(batch, heads | 1): how many keys were not masked, for mechanisms that divide by it."""
        self.checked: object = None
        """Shapes and options of the last step, which need not be checked again."""

    def count(self, present: Tensor) -> Tensor:
        """Return how many keys each new token sees, given which of the new keys (batch, heads | 1, tokens)
        are visible."""
        counts = present.cumsum(-1)
        if self.seen is not None:
            counts = counts + self.seen[..., None]
        self.seen = counts[..., -1]
        return counts

    def advance(self, state: Tensor, tokens: int) -> None:
        """Store the state after ``tokens`` more tokens."""
        self.state = state
        self.length += tokens
