"""Calls the compiled kernel: tensors in, tensors out, through the plain C interface of kernel/call.h."""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache

import torch
from torch import Tensor

from unsoft.engines import tiled
from unsoft.engines.call import compute_dtype
from unsoft.engines.dropout import keep_factor
from unsoft.engines.native.codegen import formula_source
from unsoft.engines.native.compiler import KERNEL, load_libraries
from unsoft.engines.threads import thread_count
from unsoft.formula import Formula

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
VARIABLE = struct.Struct("14q2d24q")
"""The first fields of struct Call: sizes, flags and numbers, then q, k, v and out with their strides and types."""
APPEND = struct.Struct("15q")
"""struct Append."""
_HEAD, _NO_TENSOR = struct.Struct("14q2d"), (0,) * 5
FINITE, _OUT_OF_MEMORY = 0, 2


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


def forward(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, bias: Tensor | None, counts: Tensor | None,
    positions: Tensor | None, params: Tensor, seed: Tensor | None, *, formula: str, causal_offset: int | None,
    scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, row peaks and row totals; see :class:`unsoft.engines.operator.Forward`."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    peak = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
    total = torch.empty_like(peak)
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), peak.zero_(), total.fill_(1)
    code = kernel(formula, q.dtype)
    common = _Common(
        code, q, k, v, visible, bias, counts, positions, params, seed, causal_offset, scale, dropout_p
    )
    if _status(code.forward(common.fields(out, peak, total))) == FINITE:
        return out, peak, total
    options = {"formula": formula, "causal_offset": causal_offset, "scale": scale, "dropout_p": dropout_p}
    exact = tiled.forward(q, k, v, visible, bias, counts, positions, params, seed, **options)
    finite = _finite_rows(out) & _finite_rows(exact[0])
    return (
        _where_finite(finite, out, exact[0]),
        torch.where(finite, peak, exact[1]),
        torch.where(finite, total, exact[2]),
    )


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, bias: Tensor | None,
    counts: Tensor | None, positions: Tensor | None, params: Tensor, seed: Tensor | None, out: Tensor, peak: Tensor,
    total: Tensor, *, formula: str, causal_offset: int | None, scale: float, dropout_p: float, need_bias: bool, need_params: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, bias and params; see :class:`unsoft.engines.operator.Backward`."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    dbias = params.new_zeros(*q.shape[:3], k.shape[2]) if need_bias else None
    dparams = torch.zeros(q.shape[1], params.shape[0], dtype=torch.float64) if need_params else None
    status = FINITE
    if grad_out.numel() == 0 or k.shape[2] == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        code = kernel(formula, q.dtype)
        common = _Common(
            code, q, k, v, visible, bias, counts, positions, params, seed, causal_offset, scale, dropout_p
        )
        fields = common.fields(out, peak, total, (grad_out, dq, dk, dv, dbias, dparams))
        status = _status(code.backward(fields))
    if status != FINITE:
        options = {"formula": formula, "causal_offset": causal_offset, "scale": scale, "dropout_p": dropout_p}
        saved = (q, k, v, visible, bias, counts, positions, params, seed, out, peak, total)
        exact = tiled.backward(grad_out, *saved, **options, need_bias=need_bias, need_params=need_params)
        rows = [
            _where_finite(_finite_rows(ours) & _finite_rows(theirs), ours, theirs)
            for ours, theirs in zip((dq, dk, dv), exact, strict=False)
        ]
        return *rows, *exact[3:]
    return (
        dq, dk, dv,
        params.new_empty(0) if dbias is None else dbias.sum_to_size(bias.shape),
        params.new_empty(0) if dparams is None else dparams.T.to(params.dtype),
    )  # fmt: skip


class _Common:
    """The fields of struct Call that forward and backward share, and the tensors that must outlive the call."""

    def __init__(
        self, code, q, k, v, visible, bias, counts, positions, params, seed, causal_offset, scale, dropout_p
    ) -> None:
        # What lies in the memory of a negative view (x.conj().imag is one) is not what it stands for.
        q, k, v, params = (x.resolve_neg() for x in (q, k, v, params))
        self.tensors = q, k, v
        (batch, heads, length, width), (_, kv_heads, keys, value_width) = q.shape, v.shape
        full = (batch, heads, length, keys)
        self.params = params.T.contiguous()
        self.visible = None if visible is None else visible.expand(full)
        self.bias = None if bias is None else bias.expand(full)
        self.counts = None if counts is None else counts.expand(full[:3])
        self.positions = None if positions is None else positions.expand(batch, -1)
        low, high = (0, 0) if seed is None else seed.tolist()
        self.head = _HEAD.pack(
            code.mechanism, thread_count(), batch, heads, kv_heads, length, keys, width, value_width,
            causal_offset is not None, causal_offset or 0, low, high, 0 if seed is None else min(round(dropout_p * 2**32), 2**32 - 1),
            keep_factor(dropout_p), scale,
        )  # fmt: skip
        self.inputs = (*_typed(q), *_typed(k), *_typed(v))

    def fields(self, out: Tensor, peak: Tensor, total: Tensor, gradients: tuple | None = None) -> bytes:
        values = [*self.inputs, *_typed(out)]
        rest = pack_rest(peak, total, self.counts, self.visible, self.bias, self.positions, self.params)
        more: list[int] = []
        if gradients is not None:
            grad_out, dq, dk, dv, dbias, dparams = gradients
            self.grad_out = grad_out = grad_out.resolve_neg()
            more += [
                *_typed(grad_out),
                *_typed(out),
                *_typed(dq),
                *_typed(dk),
                *_typed(dv),
                *_strided(dbias),
            ]
            more.append(0 if dparams is None else dparams.data_ptr())
        return self.head + struct.pack("24q", *values) + rest + struct.pack(f"{len(more)}q", *more)


def pack_rest(
    peak: Tensor | None,
    total: Tensor | None,
    counts: Tensor | None,
    visible: Tensor | None,
    bias: Tensor | None,
    positions: Tensor | None,
    params: Tensor,
) -> bytes:
    """The fields of struct Call after the output: row statistics (wanted by a backward pass only), masks and parameters."""
    rows = [0 if x is None else x.data_ptr() for x in (peak, total)]
    masks = [*_strided(counts), *_strided(visible), *_strided(bias), *_strided(positions)]
    return struct.pack("23q", *rows, *masks, params.data_ptr())


# The kernel has no rules for NaN and Inf, so a call that meets one is computed again by the engine that has them. Rows that
# are finite in both keep the kernel's numbers: what a row cannot see must not change it, not even in the last bit.
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


def _status(code: int) -> int:
    if code == _OUT_OF_MEMORY:
        raise MemoryError("unsoft's native engine could not allocate its tile buffers")
    return code
