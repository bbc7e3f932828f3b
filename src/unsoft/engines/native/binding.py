"""Calls the compiled kernel: tensors in, tensors out, through the plain C interface of kernel/call.h."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

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
_CACHED = TYPES | {torch.int8: 4}
"""Types of keys and values: int8 is the rows of a quantised cache (:func:`quantise`)."""
VARIABLE = struct.Struct("14q2d24q")
"""The first fields of struct Call: sizes, flags and numbers, then q, k, v and out with their strides and
types."""
_NO_TENSOR = (0,) * 5
FINITE, _OUT_OF_MEMORY = 0, 2


class Prepared:
    """Base of objects that hold addresses of tensors, which are invalid in a copy or in another process:
    copying or pickling gives None, and the owner prepares it again."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Kernel:
    """One formula or rule of rows, compiled for one arithmetic type."""

    def __init__(self, sources: dict[str, str], dtype: torch.dtype) -> None:
        """``sources``: by name, the core and what is generated for it."""
        self._core, self._generated = load_libraries(sources, "double" if dtype == torch.float64 else "float")
        self._generated.unsoft_mechanism.restype = ctypes.c_void_p
        self.mechanism = self._generated.unsoft_mechanism()
        self.forward, self.backward = self._core.unsoft_forward, self._core.unsoft_backward
        self.step: Any = getattr(self._core, "unsoft_step", None)
        self.statistics: Any = getattr(self._core, "unsoft_statistics", None)


@lru_cache(maxsize=256)
def kernel(formula: str, dtype: torch.dtype) -> Kernel:
    """Return the compiled formula of a :attr:`Formula.key` for inputs of a dtype; compile it if need be."""
    generated = formula_source(Formula.from_key(formula))
    return Kernel({"core": (KERNEL / "core.cpp").read_text(), "formula": generated}, dtype)


def forward(call: Call) -> Rows:
    """Return the output, row peaks and row totals."""
    rows = Rows.empty(call.q, call.v, call.wide)
    if call.is_empty:
        return rows.of_no_keys()
    if run_forward(kernel(call.formula.key, call.q.dtype), call, rows):
        return rows
    exact = tiled.forward(call)
    finite = _finite_rows(rows.out) & _finite_rows(exact.out)
    return Rows(
        _where_finite(finite, rows.out, exact.out),
        torch.where(finite, rows.peak, exact.peak),
        torch.where(finite, rows.total, exact.total),
    )


def backward(call: Call, upstream: Upstream) -> Gradients:
    """Return the gradients of q, k and v, and of what else is needed."""
    ours, finite = run_backward(kernel(call.formula.key, call.q.dtype), call, upstream)
    if finite:
        return ours
    exact = tiled.backward(call, upstream)
    # The kernel does not set the gradient of a bad value to 0: hence the inputs are looked at too.
    dq, dk, dv = (
        _where_finite(_finite_rows(x) & _finite_rows(y) & _finite_rows(given), x, y)
        for x, y, given in zip(ours[:3], exact[:3], (call.q, call.k, call.v), strict=True)
    )
    return exact._replace(q=dq, k=dk, v=dv)


def forward_with_statistics(call: Call, statistics: Sequence[Tensor]) -> Tensor | None:
    """Fill in statistics of a call that has keys and no dropout; return the output, None if the kernel saw
    something that is not finite. ``statistics``: contiguous, in the order of struct Statistics."""
    code, rows = kernel(call.formula.key, call.q.dtype), Rows.empty(call.q, call.v)
    common = Common(code, call)
    targets = struct.pack(f"{len(statistics)}q", *map(address, statistics))
    return rows.out if check_status(code.statistics(common.pack(*rows), targets)) == FINITE else None


def run_forward(code: Kernel, call: Call, rows: Rows) -> bool:
    """Fill in the results; return False if the kernel saw something that is not finite."""
    common = Common(code, call)  # held until the kernel has returned
    return check_status(code.forward(common.pack(*rows))) == FINITE


def run_backward(code: Kernel, call: Call, upstream: Upstream) -> tuple[Gradients, bool]:
    """Return the gradients, and False if the kernel saw something that is not finite."""
    return gradients(code, call, upstream, code.backward)


def gradients(
    code: Kernel, call: Call, upstream: Upstream, run: Callable[[bytes], int]
) -> tuple[Gradients, bool]:
    """Return the gradients that a backward pass in compiled code fills in, and False if something was not
    finite. ``run`` takes struct Call."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (call.q, call.k, call.v))
    optional, status = upstream.optional_gradients(call, (*call.q.shape[:3], call.k.shape[2])), FINITE
    if optional.params is not None:  # in float64: thousands of rows add to one number
        optional = optional._replace(params=torch.zeros(call.params.T.shape, dtype=torch.float64))
    if not call.is_empty:
        common = Common(code, call)
        packed = common.pack(*upstream.rows, (upstream.grad_out, dq, dk, dv), optional)
        status = check_status(run(packed))
    if optional.params is not None:
        optional = optional._replace(params=optional.params.T.to(call.params.dtype))
    return Gradients.finished(call, dq, dk, dv, optional), status == FINITE


class Common:
    """The fields of struct Call that forward and backward share, and the tensors that must outlive the
    call."""

    def __init__(self, code: Kernel, call: Call) -> None:
        # A tensor with the negative bit set (x.conj().imag is one) stores the negated values.
        self.q, self.k, self.v = call.q.resolve_neg(), call.k.resolve_neg(), call.v.resolve_neg()
        full = (*self.q.shape[:3], self.k.shape[2])
        self.code, self.call = code, call
        self.params = call.params.resolve_neg().T.contiguous()
        self.masks = (
            None if call.counts is None else call.counts.expand(full[:3]),
            None if call.visible is None else call.visible.expand(full),
            None if call.bias is None else call.bias.expand(full),
            None if call.positions is None else call.positions.expand(full[0], -1),
            # As (batch, head, row, end), the strides of struct Tensor; the ends of a row are neighbours.
            None if call.spans is None else call.spans.contiguous()[:, None].expand(*full[:3], 2),
        )
        self.fields = (
            None if call.query_fields is None else call.query_fields.resolve_neg(),
            None if call.key_fields is None else _row_by_row(call.key_fields.resolve_neg()),
        )

    def pack(
        self,
        out: Tensor,
        peak: Tensor,
        total: Tensor,
        gradients: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
        requested: tuple[Tensor | None, ...] = (),
    ) -> bytes:
        """Return struct Call. ``gradients``: of the output, and those of q, k and v to fill; ``requested``:
        those of bias, parameters, fields of queries and of keys."""
        call, dropout = self.call, (0, 0, 0)
        if call.seed is not None:
            low, high = call.seed.tolist()
            # p = 1 would be 2**32, one more than 32 bits hold; the factor of kept weights is 0 then.
            dropout = (low, high, min(round(call.dropout_p * 2**32), 2**32 - 1))
        numbers = (*dropout, keep_factor(call.dropout_p), call.scale)
        tensors = (self.q, self.k, self.v, out)
        inputs = pack_inputs(self.code, *tensors, self.k.shape[2], call.causal_offset, numbers)
        rest = pack_rest(peak, total, self.masks, self.params, self.fields, self.q.shape[1])
        if gradients is None:
            return inputs + rest
        grad_out, *filled = gradients
        self.grad_out = grad_out = grad_out.resolve_neg()
        more = [number for x in (grad_out, out, *filled) for number in _typed(x)]
        more += (*_strided(requested[0]), *map(address, requested[1:]))
        return inputs + rest + struct.pack(f"{len(more)}q", *more)


def pack_inputs(
    code: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    keys: int,
    causal_offset: int | None,
    numbers: tuple[int, int, int, float, float],
) -> bytes:
    """Return the first fields of struct Call. ``numbers``: two words of the dropout seed, the threshold below
    which a weight is dropped, the factor of kept weights, and the scale."""
    batch, heads, length, width = q.shape
    causal = (causal_offset is not None, causal_offset or 0)
    return VARIABLE.pack(
        *(code.mechanism, thread_count(), batch, heads, k.shape[1], length, keys, width, out.shape[3]),
        *(*causal, *numbers),
        *_typed(q),
        *(k.data_ptr(), *k.stride(), _CACHED[k.dtype]),
        *(v.data_ptr(), *v.stride(), _CACHED[v.dtype]),
        *_typed(out),
    )


BIAS, QUERY_FIELDS = 8 * (2 + 5 * 2), 8 * (2 + 5 * 5 + 1)
"""Offsets in bytes in :func:`pack_rest`: of the float mask, after row statistics and two masks; of the
queries' fields, after all masks and the parameters."""


def pack_rest(
    peak: Tensor | None,
    total: Tensor | None,
    masks: Sequence[Tensor | None],
    params: Tensor,
    fields: tuple[Tensor | None, Tensor | None] = (None, None),
    heads: int = 1,
) -> bytes:
    """Return the fields of struct Call after the output: row statistics (for a backward pass only), masks
    (counts, visible, bias, positions, spans), parameters, and the fields of queries and keys."""
    numbers = [address(peak), address(total)]
    for mask in masks:
        numbers += _strided(mask)
    numbers.append(params.data_ptr())
    for field in fields:
        numbers += _strided(field)
    shared = 1 if fields[1] is None else heads // fields[1].shape[2]
    return struct.pack("39q", *numbers, shared)


# The kernel has no rules for NaN and Inf, so the tiled engine, which has them, repeats a call that contains
# one. Rows that are finite in both keep the kernel's numbers: what a row cannot see must not change it, not
# even in the last bit.
def _finite_rows(x: Tensor) -> Tensor:
    return x.isfinite().all(-1)


def _where_finite(finite: Tensor, ours: Tensor, exact: Tensor) -> Tensor:
    return torch.where(finite[..., None], ours, exact)


def address(x: Tensor | None) -> int:
    """Return where a tensor lies in memory; 0 for None."""
    return 0 if x is None else x.data_ptr()


def _typed(x: Tensor) -> tuple[int, ...]:
    return (x.data_ptr(), *x.stride(), TYPES[x.dtype])


def _strided(x: Tensor | None) -> tuple[int, ...]:
    if x is None:
        return _NO_TENSOR
    strides = x.stride()
    return (x.data_ptr(), *strides, *(0,) * (4 - len(strides)))


def _row_by_row(x: Tensor) -> Tensor:
    """Return the same numbers with those of neighbouring keys side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_status(code: int) -> int:
    """Return what compiled code returned; raise MemoryError if it ran out of memory."""
    if code == _OUT_OF_MEMORY:
        raise MemoryError("unsoft's native engine could not allocate its buffers")
    return code
