"""Instructions that compute in registers."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.engines.triton.compiled.ptx.errors import PtxError
from tests.engines.triton.compiled.ptx.numbers import (
    UNSIGNED,
    divided,
    flushed,
    from_half,
    numpy_type,
    shifted,
    to_bfloat16,
    widened,
)
from tests.engines.triton.compiled.ptx.program import Program, handles

_PLAIN: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "neg": lambda a: -a,
    "abs": np.abs,
    "div": divided,
    "rem": lambda a, b: a - divided(a, b).astype(a.dtype) * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "max": lambda a, b: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
    "min": lambda a, b: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
    "ex2": lambda a: flushed(np.exp2(flushed(a).astype(np.float64)).astype(np.float32)),
    "lg2": lambda a: np.log2(flushed(a)),
    "sqrt": np.sqrt,
    "rcp": lambda a: 1 / a,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "copysign": lambda a, b: np.copysign(b, a),
}


_SIGN_BITS = {"abs": lambda x, bits: x & ~x.dtype.type(bits), "neg": lambda x, bits: x ^ x.dtype.type(bits)}
_NARROW = dict.fromkeys(("bf16", "f16"), (16, 0x8000)) | dict.fromkeys(("bf16x2", "f16x2"), (32, 0x80008000))
"""Numbers of 16 bits, alone or in pairs: the bits of the register, and where the signs are."""


def _plain(name: str) -> Callable[..., None]:
    def run(program: Program, kinds: list[str], args: list[Any], active: Any) -> None:
        kind = next((x for x in reversed(kinds) if re.fullmatch(r"[subf]\d+|pred", x)), None)
        if kind is None and name in _SIGN_BITS and kinds[-1] in _NARROW:
            width, bits = _NARROW[kinds[-1]]
            program.put(args[0], _SIGN_BITS[name](program.bits(args[1], width), bits), active)
            return
        if kinds[-1] in ("s16x2", "u16x2"):
            pairs = [program.bits(a, 32).view(np.int16) for a in args[1:]]
            program.put(args[0], _PLAIN[name](*pairs).view(np.uint32), active)
            return
        if kind is None:
            raise PtxError(f"unknown instruction {'.'.join([name, *kinds])}")
        x = [program.value(a, kind) for a in args[1:]]
        program.put(args[0], np.asarray(_PLAIN[name](*x)).astype(x[0].dtype), active)

    return run


for _name in _PLAIN:
    handles(_name)(_plain(_name))


@handles("shl")
def shl(program, kinds, args, active):
    x = program.value(args[1], kinds[-1])
    program.put(args[0], shifted(x, program.bits(args[2], 32), left=True), active)


@handles("shr")
def shr(program, kinds, args, active):
    x = program.value(args[1], kinds[-1])
    program.put(args[0], shifted(x, program.bits(args[2], 32), left=False), active)


@handles("mul")
def mul(program, kinds, args, active):
    a, b = (program.value(x, kinds[-1]) for x in args[1:])
    if "hi" in kinds:
        wide = (widened(a).astype(object) * widened(b).astype(object)) >> (8 * a.dtype.itemsize)
        program.put(
            args[0], wide.astype(np.int64 if a.dtype.kind == "i" else np.uint64).astype(a.dtype), active
        )
    else:
        program.put(args[0], widened(a) * widened(b) if "wide" in kinds else a * b, active)


@handles("mad")
def mad(program, kinds, args, active):
    a, b = (program.value(x, kinds[-1]) for x in args[1:3])
    if "wide" in kinds:
        added = program.value(args[3], f"{kinds[-1][0]}64")
        program.put(args[0], widened(a) * widened(b) + added, active)
    else:
        program.put(args[0], a * b + program.value(args[3], kinds[-1]), active)


@handles("fma")
def fma(program, kinds, args, active):
    # The product of float32 is exact in float64, whose rounding of the sum is far below that of float32.
    a, b, c = (program.value(x, kinds[-1]).astype(np.float64) for x in args[1:])
    program.put(args[0], (a * b + c).astype(numpy_type(kinds[-1])), active)


@handles("setp")
def setp(program, kinds, args, active):
    test, kind = kinds[0], kinds[-1]
    if kind in _NARROW:  # one predicate for each number of the register
        for half, target in enumerate(args[0].split("|")):
            narrow = (program.bits(x, _NARROW[kind][0]) >> (16 * half) for x in args[1:3])
            a, b = (from_half(x, kind.removesuffix("x2")) for x in narrow)
            program.put(target, _compared(test, "f32", a, b), active)
    else:
        a, b = (program.value(x, kind) for x in args[1:3])
        program.put(args[0], _compared(test, kind, a, b), active)


def _compared(test: str, kind: str, a: Any, b: Any) -> Any:
    unordered = np.isnan(a) | np.isnan(b) if kind[0] == "f" else np.zeros(a.shape, bool)
    if test in ("num", "nan"):
        return unordered ^ (test == "num")
    compare = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    result = compare.get(
        test.removesuffix("u"), compare.get({"lo": "lt", "hi": "gt", "ls": "le", "hs": "ge"}.get(test))
    )
    if test == "ne":
        result = result & ~unordered
    return result | unordered if test.endswith("u") else result


@handles("selp")
def selp(program, kinds, args, active):
    width = int(kinds[-1][1:])
    chosen = np.where(program.registers[args[3]], program.bits(args[1], width), program.bits(args[2], width))
    program.put(args[0], chosen, active)


@handles("mov")
def mov(program, kinds, args, active):
    if kinds[-1] == "pred":
        program.put(args[0], program.value(args[1], "pred"), active)
        return
    width = int(kinds[-1][1:])
    if isinstance(args[0], list):
        whole, part = program.bits(args[1], width).astype(np.uint64), width // len(args[0])
        for k, target in enumerate(args[0]):
            piece = (whole >> np.uint64(k * part)) & np.uint64((1 << part) - 1)
            program.put(target, piece.astype(UNSIGNED[part]), active)
    elif isinstance(args[1], list):
        part, whole = width // len(args[1]), np.zeros(program.threads, np.uint64)
        for k, x in enumerate(args[1]):
            whole |= program.bits(x, part).astype(np.uint64) << np.uint64(k * part)
        program.put(args[0], whole.astype(UNSIGNED[width]), active)
    else:
        program.put(args[0], program.bits(args[1], width), active)


@handles("cvt")
def cvt(program, kinds, args, active):
    target, source = kinds[-2], kinds[-1]
    if target in ("bf16x2", "f16x2"):
        high, low = (program.value(x, "f32") for x in args[1:])
        narrow = to_bfloat16 if target == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16)
        program.put(args[0], narrow(high).astype(np.uint32) << 16 | narrow(low).astype(np.uint32), active)
    elif target == "tf32":
        rounded = (program.bits(args[1], 32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        program.put(args[0], rounded, active)
    elif target == "bf16":
        program.put(args[0], to_bfloat16(program.value(args[1], "f32")), active)
    elif source == "bf16":
        program.put(args[0], program.bits(args[1], 16).astype(np.uint32) << 16, active)
    else:
        program.put(args[0], program.value(args[1], source).astype(numpy_type(target)), active)


@handles("bfe")
def bfe(program, kinds, args, active):
    x, start, length = program.value(args[1], kinds[-1]), args[2], args[3]
    program.put(args[0], ((x << (32 - start - length)) >> (32 - length)).astype(x.dtype), active)


@handles("prmt")
def prmt(program, kinds, args, active):
    a, b, c = (program.bits(x, 32).astype(np.uint64) for x in args[1:])
    both, result = a | b << np.uint64(32), np.zeros(program.threads, np.uint64)
    for k in range(4):
        choice = (c >> np.uint64(4 * k)) & np.uint64(15)
        byte = (both >> ((choice & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * k)
    program.put(args[0], result.astype(np.uint32), active)


@handles("lop3")
def lop3(program, kinds, args, active):
    a, b, c = (program.bits(x, 32) for x in args[1:4])
    result = np.zeros(program.threads, np.uint32)
    for k in range(8):
        if args[4] >> k & 1:
            result |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    program.put(args[0], result, active)
