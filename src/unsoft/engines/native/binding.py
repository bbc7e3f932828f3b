"""Calls the compiled kernel: tensors in, tensors out, through the plain C interface of kernel/call.h."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from unsoft.engines import tiled
from unsoft.engines.call import Call, Gradients, Rows, Upstream
from unsoft.engines.dropout import keep_factor
from unsoft.engines.native.codegen import formula_source
from unsoft.engines.native.compiler import KERNEL, load_libraries
from unsoft.engines.threads import thread_count
from unsoft.formula import Formula

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
VARIABLE = struct.Struct("14q2d24q")
"""The first fields of struct Call: sizes, flags and numbers, then q, k,
v and out with their strides and types."""
_HEAD, _NO_TENSOR = struct.Struct("14q2d"), (0,) * 5
FINITE, _OUT_OF_MEMORY = 0, 2


class Compiled(Protocol):
    """A formula, or a rule of rows, as the kernel takes it."""

    mechanism: int
    """Its address."""


class Prepared:
    """Base of what holds addresses of tensors, which mean nothing to a copy or in another process: copying
    or pickling gives None, and the owner prepares it again."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Kernel:
    """One formula, compiled for one arithmetic type."""

    def __init__(self, formula: Formula, real: str) -> None:
        sources = {"core": (KERNEL / "core.cpp").read_text(), "formula": formula_source(formula)}
        self._core, self._formula = load_libraries(sources, real)
        self._formula.unsoft_mechanism.restype = ctypes.c_void_p
        self.mechanism = self._formula.unsoft_mechanism()
        self.forward, self.backward = self._core.unsoft_forward, self._core.unsoft_backward
        self.step = self._core.unsoft_step


@lru_cache(maxsize=256)
def kernel(formula: str, dtype: torch.dtype) -> Kernel:
    """The compiled formula of a :attr:`Formula.key` for inputs of a dtype; compiles it if need be."""
    return Kernel(Formula.from_key(formula), "double" if dtype == torch.float64 else "float")


def forward(call: Call) -> Rows:
    """Output, row peaks and row totals."""
    q, k, v = call.q, call.k, call.v
    out = q.new_empty(*q.shape[:3], v.shape[3])
    peak = q.new_empty(q.shape[:3], dtype=call.compute_dtype)
    total = torch.empty_like(peak)
    if out.numel() == 0 or k.shape[2] == 0:
        return Rows(out.zero_(), peak.zero_(), total.fill_(1))
    code = kernel(call.formula.key, q.dtype)
    common = Common(code, call)  # held until the kernel has returned
    if check_status(code.forward(common.fields(out, peak, total))) == FINITE:
        return Rows(out, peak, total)
    exact = tiled.forward(call)
    finite = _finite_rows(out) & _finite_rows(exact.out)
    return Rows(
        _where_finite(finite, out, exact.out),
        torch.where(finite, peak, exact.peak),
        torch.where(finite, total, exact.total),
    )


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Gradients of q, k and v, and of what else is needed."""
    q, k, v, params = call.q, call.k, call.v, call.params
    grad_out, rows, need_bias, need_params, need_query_fields, need_key_fields = upstream
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    dbias = params.new_zeros(*q.shape[:3], k.shape[2]) if need_bias else None
    dparams = torch.zeros(q.shape[1], params.shape[0], dtype=torch.float64) if need_params else None
    sides = zip(call.formula.symbols, (need_query_fields, need_key_fields), (q, k), strict=True)
    dfields = [
        params.new_zeros(len(names), *q.shape[:2], x.shape[2]) if needed else None
        for names, needed, x in sides
    ]
    status = FINITE
    if grad_out.numel() == 0 or k.shape[2] == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        code = kernel(call.formula.key, q.dtype)
        common = Common(code, call)
        fields = common.fields(*rows, (grad_out, dq, dk, dv), (dbias, dparams, *dfields))
        status = check_status(code.backward(fields))
    if status != FINITE:
        exact = tiled.backward(call, upstream)
        # A bad value does not reach its own gradient in the kernel, which has to be 0: hence the inputs too.
        dq, dk, dv = (
            _where_finite(_finite_rows(ours) & _finite_rows(theirs) & _finite_rows(given), ours, theirs)
            for ours, theirs, given in ((dq, exact.q, q), (dk, exact.k, k), (dv, exact.v, v))
        )
        return exact._replace(q=dq, k=dk, v=dv)
    dquery_fields, dkey_fields = dfields
    return Gradients(
        dq,
        dk,
        dv,
        params.new_empty(0) if dbias is None or call.bias is None else dbias.sum_to_size(call.bias.shape),
        params.new_empty(0) if dparams is None else dparams.T.to(params.dtype),
        params.new_empty(0) if dquery_fields is None else dquery_fields,
        params.new_empty(0) if dkey_fields is None else tiled.shared_heads(dkey_fields, call),
    )


class Common:
    """The fields of struct Call that forward and backward share, and the tensors that must outlive the
    call."""

    def __init__(self, code: Compiled, call: Call) -> None:
        # What lies in the memory of a negative view (x.conj().imag is one) is not what it stands for.
        q, k, v = self.tensors = call.q.resolve_neg(), call.k.resolve_neg(), call.v.resolve_neg()
        (batch, heads, length, width), (_, kv_heads, keys, value_width) = q.shape, v.shape
        full, seed = (batch, heads, length, keys), call.seed
        self.params = call.params.resolve_neg().T.contiguous()
        self.visible = None if call.visible is None else call.visible.expand(full)
        self.bias = None if call.bias is None else call.bias.expand(full)
        self.counts = None if call.counts is None else call.counts.expand(full[:3])
        self.positions = None if call.positions is None else call.positions.expand(batch, -1)
        self.query_fields = None if call.query_fields is None else call.query_fields.resolve_neg()
        self.key_fields = None if call.key_fields is None else _row_by_row(call.key_fields.resolve_neg())
        low, high = (0, 0) if seed is None else seed.tolist()
        drop_below = 0 if seed is None else min(round(call.dropout_p * 2**32), 2**32 - 1)
        self.head = _HEAD.pack(
            code.mechanism,
            thread_count(),
            batch,
            heads,
            kv_heads,
            length,
            keys,
            width,
            value_width,
            call.causal_offset is not None,
            call.causal_offset or 0,
            low,
            high,
            drop_below,
            keep_factor(call.dropout_p),
            call.scale,
        )
        self.inputs = (*_typed(q), *_typed(k), *_typed(v))

    def fields(
        self,
        out: Tensor,
        peak: Tensor,
        total: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
        asked: tuple[Tensor | None, ...] = (),
    ) -> bytes:
        """``gradients``: of the output, and those of q, k and v to fill; ``asked``: those of bias,
        parameters, fields of queries and of keys."""
        values = [*self.inputs, *_typed(out)]
        fields = (self.query_fields, self.key_fields)
        masks = (self.counts, self.visible, self.bias, self.positions)
        rest = pack_rest(peak, total, masks, self.params, fields, self.tensors[0].shape[1])
        more: list[int] = []
        if gradients is not None:
            grad_out, *filled = gradients
            self.grad_out = grad_out = grad_out.resolve_neg()
            for x in (grad_out, out, *filled):
                more += _typed(x)
            more += _strided(asked[0])
            more += (0 if x is None else x.data_ptr() for x in asked[1:])
        return self.head + struct.pack("24q", *values) + rest + struct.pack(f"{len(more)}q", *more)


QUERY_FIELDS = 8 * (2 + 4 * 5 + 1)
"""Where the address of the queries' fields stands in :func:`pack_rest`, in bytes: after row statistics, masks
and parameters."""


def pack_rest(
    peak: Tensor | None,
    total: Tensor | None,
    masks: Sequence[Tensor | None],
    params: Tensor,
    fields: tuple[Tensor | None, Tensor | None] = (None, None),
    heads: int = 1,
) -> bytes:
    """The fields of struct Call after the output: row statistics (wanted by a backward pass only), masks
    (counts, visible, bias, positions), parameters, and the fields of queries and keys."""
    numbers = [0 if x is None else x.data_ptr() for x in (peak, total)]
    for mask in masks:
        numbers += _strided(mask)
    numbers.append(params.data_ptr())
    for field in fields:
        numbers += _strided(field)
    shared = 1 if fields[1] is None else heads // fields[1].shape[2]
    return struct.pack("34q", *numbers, shared)


# The kernel has no rules for NaN and Inf, so a call that meets one is computed again by the engine that has
# them. Rows that are finite in both keep the kernel's numbers: what a row cannot see must not change it, not
# even in the last bit.
def _finite_rows(x: Tensor) -> Tensor:
    return x.isfinite().all(-1)


def _where_finite(finite: Tensor, ours: Tensor, exact: Tensor) -> Tensor:
    return torch.where(finite[..., None], ours, exact)


def _typed(x: Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), *x.stride(), TYPES[x.dtype])


def _strided(x: Tensor | None) -> tuple[int, ...]:
    if x is None:
        return _NO_TENSOR
    strides = x.stride()
    return (x.data_ptr(), *strides, *(0,) * (4 - len(strides)))


def _row_by_row(x: Tensor) -> Tensor:
    """The same numbers, those of neighbouring keys side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_status(code: int) -> int:
    if code == _OUT_OF_MEMORY:
        raise MemoryError("unsoft's native engine could not allocate its tile buffers")
    return code
