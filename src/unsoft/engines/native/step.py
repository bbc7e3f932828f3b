"""Decoding steps by compiled code, where many small torch calls would take longer than the arithmetic.

A step of a formula is one call: it appends new keys and values to the buffers of a cache, then attends to all
of them. What stays the same from step to step (formula, shapes, buffers) is checked and packed once
(:func:`prepare_step`). After that a step compares a few numbers and passes on six. Anything unusual is left
to the general path, as in direct.py.

Linear attention goes from token to token (:func:`recurrence`). A pair of attention maps gets its second query
before the maps (:func:`pair_queries`) and their difference after them (:func:`pair_difference`).
"""

import ctypes
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsoft.engines.call import compute_dtype
from unsoft.engines.linear.attention import vanishing
from unsoft.engines.native import binding
from unsoft.engines.native.availability import library, library_failure
from unsoft.engines.native.direct import Plan, observed, pack_call, plan_of
from unsoft.engines.threads import thread_count
from unsoft.formula import Formula

_SCALE = 4
"""Bytes before the numbers of a quantised row."""
_APPEND = struct.Struct("15q")
_TOKEN, _ADDRESS = struct.Struct("6q"), struct.Struct("q")
_PAIRS, _RECURRENCE = struct.Struct("13q"), struct.Struct("21q4d")
_REST = 2 * _APPEND.size + binding.VARIABLE.size
_BIAS, _QUERY_FIELDS = _REST + binding.BIAS, _REST + binding.QUERY_FIELDS
MAPS = {"identity": 0, "relu": 1, "elu1": 2, "cosine": 3}
"""Feature maps of compiled linear attention; others are applied before."""


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
        varying = new if field is None else (*new, field.queries)
        self.layouts = [(x.dtype, x.shape, x.stride()) for x in varying]
        self.tokens, self.room = key.shape[2], keys.shape[2]
        self.alike = query.is_contiguous() and query.shape[3] == value.shape[3]
        self.out_shape = (*query.shape[:3], value.shape[3])
        tables = (None, None) if field is None else (field.queries[None], field.keys[None])
        out = self._empty(query)
        call = pack_call(plan, query, keys, values, out, self.tokens, "lower_right", tables)
        self._memory = ctypes.create_string_buffer(pack_append(keys, key) + pack_append(values, value) + call)
        self.function: Callable[[Any, bytes], int] = plan.kernel.step
        """Compiled code that takes struct Step and struct Token."""

    def set_mask(self, bias: Tensor) -> None:
        """Let all steps read a float mask (batch, heads, room), which must outlive them."""
        numbers = (bias.data_ptr(), *bias.stride()[:2], 0, 1)
        struct.pack_into("5q", self._memory, _BIAS, *numbers)

    def serves(
        self,
        formula: Formula,
        buffers: tuple[Tensor | None, Tensor | None],
        options: object,
        field: Field | None = None,
    ) -> bool:
        """Return True if it was prepared for this formula, these very buffers and these options."""
        same = self.buffers[0] is buffers[0] and self.buffers[1] is buffers[1]
        if field is None or self.field is None:
            same = same and field is self.field
        else:
            mine, given = self.field.keys, field.keys
            same = same and mine.data_ptr() == given.data_ptr() and mine.stride() == given.stride()
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
        varying = (query, key, value) if field is None else (query, key, value, field.queries)
        for x, layout in zip(varying, self.layouts, strict=True):
            if type(x) is not Tensor or (x.dtype, x.shape, x.stride()) != layout or not x.is_cpu:
                return None
            if x.is_neg() or (grad and x.requires_grad):
                return None
        if field is not None:
            _ADDRESS.pack_into(self._memory, _QUERY_FIELDS, field.queries.data_ptr())
        out = self._empty(query)
        token = _TOKEN.pack(
            length, thread_count(), query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        )
        return out if self.function(self._memory, token) == binding.FINITE else None

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
        if plan is None or keys.dtype is not values.dtype or keys.dtype not in (query.dtype, torch.int8):
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
    wanted = quantised_width(shape[3]) if buffer.dtype is torch.int8 else shape[3]
    return (batch, heads, width) == (shape[0], shape[1], wanted) and buffer.stride(3) == 1


def _field_fits(field: Field, query: Tensor, keys: Tensor) -> bool:
    new, held = field
    wide = compute_dtype(query.dtype)
    if new.shape != query.shape[:3] or new.dtype is not wide or held.dtype is not wide:
        return False
    if held.requires_grad or not (new.is_cpu and held.is_cpu) or held.stride(2) != 1:
        return False
    batch, heads, room = held.shape
    return batch == query.shape[0] and heads in (query.shape[1], keys.shape[1]) and room >= keys.shape[2]


def quantised_width(width: int) -> int:
    """Return the bytes of a quantised row: its scale, and its numbers up to a multiple of four."""
    return _SCALE + (width + 3) // 4 * 4


def quantised(x: Tensor) -> Tensor:
    """Return rows (..., width) as int8: the bytes of a float32 scale, then round(127 x / max |x|).

    The largest number of a row becomes 127 or -127, so that none is cut off, and the error is at most half a
    step, max |x| / 254. A row that is not finite gets the scale NaN, and one below 1e-36, by which 127 cannot
    be divided, becomes 0: as kernel/tensors.h does for single tokens, to the last bit.

    >>> row = quantised(torch.tensor([[1.0, -0.5, 0.26]]))
    >>> row[:, 4:], dequantised(row, 3, torch.float32)
    (tensor([[127, -64,  33,   0]], dtype=torch.int8), tensor([[ 1.0000, -0.5039,  0.2598]]))
    """
    x = x.to(compute_dtype(x.dtype))
    largest = x.abs().amax(-1, keepdim=True)
    finite, usable = x.isfinite().all(-1, keepdim=True), largest > 1e-36
    scale = torch.where(finite, torch.where(usable, largest / 127, 0.0), torch.nan).float()
    steps = torch.where(finite & usable, x * (127 / largest), 0.0).round().to(torch.int8)
    row = steps.new_zeros(*x.shape[:-1], quantised_width(x.shape[-1]))
    row[..., :_SCALE] = scale.view(torch.int8)
    row[..., _SCALE : _SCALE + x.shape[-1]] = steps
    return row


def dequantised(rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers (..., width) of quantised rows."""
    scale = rows[..., :_SCALE].view(torch.float32)
    return (rows[..., _SCALE : _SCALE + width].to(compute_dtype(dtype)) * scale).to(dtype)


def pack_append(buffer: Tensor, new: Tensor) -> bytes:
    """Return struct Append, whose addresses are filled in at every step."""
    return _APPEND.pack(*new.shape, buffer.element_size(), 0, *buffer.stride(), 0, *new.stride())


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    *,
    normalise: bool,
    feature_map: str = "identity",
    decay: Tensor | None = None,
    logarithmic: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    first: int = 0,
    limit: int = 1,
) -> tuple[Tensor, Tensor] | None:
    """Return what :func:`unsoft.engines.linear.attention.linear_attention` does for a causal call,
    or None if something is not finite.

    q, k, v are float32 or float64 on the CPU; ``feature_map`` is applied to them times ``scales`` ("cosine":
    see cosformer, whose positions begin at ``first`` and whose M is ``limit``). ``state`` is not changed.

    >>> q, k, v = (torch.rand(1, 2, 5, 3) for _ in range(3))
    >>> out, state = recurrence(q, k, v, None, normalise=True)
    >>> from unsoft.engines.linear.attention import linear_attention
    >>> torch.allclose(out, linear_attention(q, k, v, causal=True, normalise=True)[0])
    True
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (batch, heads, tokens, width), (_, key_heads, _, values) = q.shape, v.shape
    features = 2 * width if feature_map == "cosine" else width
    state_heads = key_heads if decay is None else heads
    if state is not None:
        state = state.contiguous()
    after = q.new_empty(batch, state_heads, features, values + (2 if logarithmic else 1))
    out = q.new_empty(batch, heads, tokens, values)
    sizes = (batch, heads, key_heads, state_heads, tokens, width, values, features)
    flags = (MAPS[feature_map], normalise, logarithmic, first, limit)
    addresses = (binding.address(x) for x in (q, k, v, decay, state, after, out))
    numbers = (*scales, math.pi / 2 / limit, vanishing(q.dtype))
    call = _RECURRENCE.pack(thread_count(), *sizes, *flags, *addresses, *numbers)
    status = binding.check_status(library("recurrence", q.dtype == torch.float64).unsoft_recurrence(call))
    return (out, after) if status == binding.FINITE else None


def pairs_ready(query: Tensor, negative_map: Tensor) -> bool:
    """Return True if compiled code can take this query (B, H, T, D) and map (H, D, D)."""
    dtype = query.dtype
    usual = query.dim() == 4 and query.is_cpu and dtype in (torch.float32, torch.float64)
    fits = usual and negative_map.shape == (query.shape[1], query.shape[3], query.shape[3])
    return fits and negative_map.dtype is dtype and library_failure("pairs", dtype is torch.float64) is None


def pair_queries(query: Tensor, negative_map: Tensor, mapped_first: bool) -> Tensor:
    """Return (B, 2 H, T, D): each query head, and after it relu(q) W, or relu(q W) if ``mapped_first``.

    >>> q, w = torch.tensor([[[[1.0, -2.0]]]]), torch.tensor([[[3.0, 5.0], [7.0, 9.0]]])
    >>> pair_queries(q, w, False).flatten(0, 2)
    tensor([[ 1., -2.],
            [ 3.,  5.]])
    """
    query, negative_map = query.contiguous(), negative_map.contiguous()
    batch, heads, tokens, width = query.shape
    both = query.new_empty(batch, 2 * heads, tokens, width)
    addresses = (query.data_ptr(), negative_map.data_ptr(), both.data_ptr())
    call = _PAIRS.pack(batch, heads, tokens, width, 0, mapped_first, *addresses, 0, 0, 0, 0)
    library("pairs", query.dtype is torch.float64).unsoft_pair_queries(call)
    return both


def pair_difference(maps: Tensor, plus: Tensor, minus: Tensor) -> Tensor:
    """Return plus A1 - minus A2 for outputs (B, 2 H, T, Dv) of heads in pairs, with two numbers per pair.

    >>> maps = torch.tensor([[[[1.0, 2.0]], [[10.0, 20.0]]]])
    >>> pair_difference(maps, torch.tensor([2.0]), torch.tensor([0.5])).flatten()
    tensor([-3., -6.])
    """
    batch, heads, tokens, values = maps.shape
    out = maps.new_empty(batch, heads // 2, tokens, values)
    addresses = (x.data_ptr() for x in (maps, plus, minus, out))
    call = _PAIRS.pack(batch, heads // 2, tokens, 0, values, 0, 0, 0, 0, *addresses)
    library("pairs", maps.dtype is torch.float64).unsoft_pair_difference(call)
    return out
