"""Decoding steps by one call of compiled code: it appends new keys and values to the buffers of a cache, then
attends to all of them.

What stays the same from step to step (formula, shapes, buffers) is checked and packed once
(:func:`prepare_step`); after that a step compares a few numbers and passes on six. Anything unusual is left
to the general path, as in direct.py.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from unsoft.engines.call import compute_dtype
from unsoft.engines.native import binding
from unsoft.engines.native.direct import Plan, observed, pack_call, plan_of
from unsoft.engines.threads import thread_count
from unsoft.formula import Formula

_APPEND = struct.Struct("15q")
_TOKEN, _ADDRESS = struct.Struct("6q"), struct.Struct("q")
_QUERY_FIELDS = 2 * _APPEND.size + binding.VARIABLE.size + binding.QUERY_FIELDS


class Field(NamedTuple):
    """One number per query and per key, for a formula with such a field (fox)."""

    queries: Tensor
    """(batch, heads, tokens), of the new queries."""
    keys: Tensor
    """(batch, heads or key heads, room), the buffer of the cache; new ones are in it already."""


class Step(binding.Prepared):
    """Prepared steps of one formula, one shape of queries, keys and values, and the buffers of one cache."""

    def __init__(
        self,
        plan: Plan,
        new: tuple[Tensor, Tensor, Tensor],
        buffers: tuple[Tensor, Tensor],
        options: object,
        field: Field | None = None,
    ) -> None:
        query, key, value = new
        keys, values = buffers
        self.plan, self.buffers, self.field = plan, buffers, field  # the numbers below point into these
        self.options = options
        self.dtype = query.dtype
        self.layouts = [(x.shape, x.stride()) for x in new]
        self.tokens, self.room = key.shape[2], keys.shape[2]
        self.alike = query.is_contiguous() and query.shape[3] == value.shape[3]
        self.out_shape = (*query.shape[:3], value.shape[3])
        tables = (None, None) if field is None else (field.queries[None], field.keys[None])
        out = self._empty(query)
        call = pack_call(plan, query, keys, values, out, self.tokens, "lower_right", tables)
        self._memory = ctypes.create_string_buffer(
            _pack_append(keys, key) + _pack_append(values, value) + call
        )
        self._step = plan.kernel.step

    def serves(
        self,
        formula: Formula,
        buffers: tuple[Tensor | None, Tensor | None],
        options: object,
        field: Field | None = None,
    ) -> bool:
        """Return True if it was prepared for this formula, these very buffers and these options."""
        same = self.buffers[0] is buffers[0] and self.buffers[1] is buffers[1]
        if field is not None:
            mine = None if self.field is None else self.field.keys
            same = same and mine is not None and mine.data_ptr() == field.keys.data_ptr()
            same = same and mine is not None and mine.stride() == field.keys.stride()
        return same and self.plan.formula is formula and self.options == options

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, length: int, field: Field | None = None
    ) -> Tensor | None:
        """Return the output of the step after ``length`` tokens.

        None if it has to take the general path; what was appended then does not count.
        """
        if length + self.tokens > self.room or observed():
            return None
        grad = torch.is_grad_enabled()
        for x, (shape, strides) in zip((query, key, value), self.layouts, strict=True):
            if type(x) is not Tensor or x.dtype is not self.dtype or x.shape != shape or not x.is_cpu:
                return None
            if x.stride() != strides or x.is_neg() or (grad and x.requires_grad):
                return None
        if field is not None and not self._takes(field, grad):
            return None
        out = self._empty(query)
        token = _TOKEN.pack(
            length, thread_count(), query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        )
        return out if self._step(self._memory, token) == binding.FINITE else None

    def _takes(self, field: Field, grad: bool) -> bool:
        """Pack the address of the queries' field if its layout is the one that the step was prepared for;
        else return False."""
        new, mine = field.queries, self.field
        if mine is None or new.shape != mine.queries.shape or new.stride() != mine.queries.stride():
            return False
        if new.dtype is not mine.queries.dtype or new.is_neg() or (grad and new.requires_grad):
            return False
        _ADDRESS.pack_into(self._memory, _QUERY_FIELDS, new.data_ptr())
        return True

    def _empty(self, query: Tensor) -> Tensor:
        return torch.empty_like(query) if self.alike else query.new_empty(self.out_shape)


def prepare_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formula: Formula,
    scale: float | None,
    enable_gqa: bool,
    buffers: tuple[Tensor | None, Tensor | None],
    field: Field | None = None,
) -> Step | None:
    """Return a step for inputs like these, or None if such inputs have to take the general path."""
    keys, values = buffers
    if keys is None or values is None or keys.requires_grad or values.requires_grad:
        return None
    try:
        plan = plan_of(query, key, value, formula, "lower_right", scale, enable_gqa, field is not None)
        if plan is None or keys.dtype is not query.dtype or values.dtype is not query.dtype:
            return None
        if not (_fits(keys, key) and _fits(values, value) and keys.shape[2] == values.shape[2]):
            return None
        if field is not None and not _field_fits(field, query, keys):
            return None
        return Step(plan, (query, key, value), (keys, values), (scale, enable_gqa), field)
    except (RuntimeError, ValueError):  # not of four dimensions, sparse, nested
        return None


def _fits(buffer: Tensor, new: Tensor) -> bool:
    (batch, heads, _, width), shape = buffer.shape, new.shape
    return (batch, heads, width) == (shape[0], shape[1], shape[3]) and buffer.stride(3) == 1


def _field_fits(field: Field, query: Tensor, keys: Tensor) -> bool:
    new, held = field
    wide = compute_dtype(query.dtype)
    if new.shape != query.shape[:3] or new.dtype is not wide or held.dtype is not wide:
        return False
    if held.requires_grad or not (new.is_cpu and held.is_cpu) or held.stride(2) != 1:
        return False
    batch, heads, room = held.shape
    return batch == query.shape[0] and heads in (query.shape[1], keys.shape[1]) and room >= keys.shape[2]


def _pack_append(buffer: Tensor, new: Tensor) -> bytes:
    return _APPEND.pack(*new.shape, buffer.element_size(), 0, *buffer.stride(), 0, *new.stride())
