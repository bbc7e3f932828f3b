"""Numbers as bits, and bits as numbers."""

from typing import Any

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATING = {16: np.float16, 32: np.float32, 64: np.float64}
_FAMILIES = {"u": UNSIGNED, "b": UNSIGNED, "s": SIGNED, "f": FLOATING}


def numpy_type(kind: str) -> Any:
    """Properties of a PTX type such as s32, b16 or f64."""
    return _FAMILIES[kind[0]][int(kind[1:])]


def widened(x: Any) -> Any:
    return x.astype(np.int64 if x.dtype.kind == "i" else np.uint64)


def from_half(x: Any, kind: str) -> Any:
    """The low 16 bits as bf16 or f16, in float32."""
    low = (x & 0xFFFF).astype(np.uint16)
    if kind == "bf16":
        return (low.astype(np.uint32) << 16).view(np.float32)
    return low.view(np.float16).astype(np.float32)


def to_bfloat16(x: Any) -> Any:
    """Float32 rounded to nearest even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def flushed(x: Any) -> Any:
    """Float32 without subnormal numbers."""
    zero = np.copysign(np.float32(0), x)
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, zero, x).astype(np.float32)


def shifted(x: Any, by: Any, left: bool) -> Any:
    width = 8 * x.dtype.itemsize
    within = np.minimum(by, width - 1).astype(x.dtype)
    if not left and x.dtype.kind == "i":
        return x >> within
    return np.where(by >= width, 0, x << within if left else x >> within).astype(x.dtype)


def divided(a: Any, b: Any) -> Any:
    """Towards zero, as integers are on a GPU."""
    if a.dtype.kind == "f":
        return a / b
    a, b = a.astype(np.int64), b.astype(np.int64)
    return np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
