"""A strict version of Triton's interpreter: wrong results are corrected, hidden faults become errors.

The original (3.9.0) multiplies the bit patterns of bfloat16 in tl.dot, truncates float32 to
bfloat16 where a GPU rounds to nearest, computes TF32 products exactly, reads 0 where a GPU reads anything
(masked entries of a load without ``other``), reads and writes any address, and runs programs one after the
other, so that two programs that write the same element look fine. :func:`strict` changes that:

- bfloat16 operands of tl.dot are the numbers they stand for, and float32 is rounded to them; operands of TF32
  products are rounded to TF32;
- undefined entries are NaN (or an odd integer);
- an address outside the tensors of the launch, an element written by two programs, and an element that one
  program writes and another reads are errors.
"""

from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_load, _store = interpreter._interpreter.load, interpreter._interpreter.store
_SEVERAL = 2**31 - 1


class MemoryFault(Exception):
    """A kernel made an invalid memory access."""


class Memory:
    """Tensors of a launch, with the program that has written or read each byte."""

    def begin(self, tensors: list[Any]) -> None:
        ranges = sorted({(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors})
        sizes = [size for _, size in ranges]
        self.starts = np.array([start for start, _ in ranges], np.int64)
        self.ends = self.starts + np.array(sizes, np.int64)
        self.bases = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self.writer, self.reader = (np.full(sum(sizes), -1, np.int32) for _ in range(2))

    def places(self, pointers: Any, mask: Any, size: int, what: str) -> Any:
        shape = np.broadcast_shapes(np.shape(pointers), np.shape(mask))
        at = np.broadcast_to(pointers, shape)[np.broadcast_to(mask, shape)].astype(np.int64)
        if at.size == 0:
            return at
        which = np.searchsorted(self.starts, at, side="right") - 1
        if (which < 0).any() or (at + size > self.ends[which]).any():
            raise MemoryFault(f"{what} outside the tensors of the launch")
        return at - self.starts[which] + self.bases[which]

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        at, me = self.places(pointers, mask, np.dtype(dtype).itemsize, "load"), program()
        if ((self.writer[at] >= 0) & (self.writer[at] != me)).any():
            raise MemoryFault("one program reads what another writes")
        first = self.reader[at]
        self.reader[at] = np.where((first >= 0) & (first != me), _SEVERAL, me)
        return _load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        at, me = self.places(pointers, mask, values.dtype.itemsize, "store"), program()
        if np.unique(at).size != at.size:
            raise MemoryFault("one store writes an element twice")
        if ((self.writer[at] >= 0) & (self.writer[at] != me)).any():
            raise MemoryFault("two programs write the same element")
        if ((self.reader[at] >= 0) & (self.reader[at] != me)).any():
            raise MemoryFault("one program writes what another reads")
        self.writer[at] = me
        return _store(pointers, values, mask)


def program() -> int:
    """Return the number of the running program."""
    builder = interpreter.interpreter_builder
    (x, y, z), (_, height, depth) = builder.grid_idx, builder.grid_dim
    return (x * height + y) * depth + z


def operand(x: Any, precision: Any) -> Any:
    """Return the operand of a dot as the hardware reads it, in a dtype that holds it exactly."""
    if x.dtype.scalar == tl.bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    if x.dtype.scalar == tl.float32 and str(precision).endswith(".TF32"):
        bits = np.ascontiguousarray(x.data).view(np.uint32)
        return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)
    return x.data


def tensors_in(arguments: Any) -> list[Any]:
    """Return all tensors of a launch, also those inside tuples."""
    if hasattr(arguments, "data_ptr"):
        return [arguments]
    return [t for x in arguments for t in tensors_in(x)] if isinstance(arguments, (tuple, list)) else []


@contextmanager
def strict():
    """Run kernels in the strict interpreter."""
    builder, memory, patched = interpreter.InterpreterBuilder, Memory(), set()
    masked_load, cast_impl = builder.create_masked_load, builder.cast_impl
    executor = interpreter.GridExecutor._init_args_hst

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = operand(a, input_precision), operand(b, input_precision)
        product = np.matmul(left, right, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def cast(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(src.data).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            data = np.where(np.isnan(src.data), 0x7FC0, rounded).astype(np.uint16)
            return interpreter.TensorHandle(data.reshape(src.data.shape), tl.bfloat16)
        return cast_impl(self, src, dst_type)

    def create_masked_load(self, pointers, mask, other, *rest):
        if other is None:
            kind = pointers.get_element_ty()
            dtype = interpreter._get_np_dtype(kind)
            odd = np.nan if np.issubdtype(dtype, np.floating) else 0x7FC1 if kind == tl.bfloat16 else 85
            other = interpreter.TensorHandle(np.full(pointers.data.shape, odd, dtype), kind)
        return masked_load(self, pointers, mask, other, *rest)

    def init_args(self, positional, keywords):
        positional, keywords = executor(self, positional, keywords)
        patched.clear()
        memory.begin(tensors_in([*positional, *keywords.values()]))
        return positional, keywords

    def call(self, *positional, **keywords):
        if id(self.fn.__globals__) not in patched:  # once a launch, not at every call: twice as fast
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*positional, **keywords)

    native = mock.Mock(wraps=interpreter._interpreter)
    native.load, native.store = memory.load, memory.store
    with (
        mock.patch.object(builder, "create_dot", create_dot),
        mock.patch.object(builder, "create_masked_load", create_masked_load),
        mock.patch.object(builder, "cast_impl", cast),
        mock.patch.object(interpreter.GridExecutor, "_init_args_hst", init_args),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", call),
        mock.patch.object(interpreter, "_interpreter", native),
        np.errstate(all="ignore"),
    ):
        yield
