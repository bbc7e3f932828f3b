"""Matrix instructions: mma of a warp (Ampere) and wgmma of a group of four warps (Hopper)."""

import re

import numpy as np

from tests.engines.triton.compiled.ptx.errors import PtxError
from tests.engines.triton.compiled.ptx.numbers import from_half
from tests.engines.triton.compiled.ptx.program import handles

_LANE = np.arange(32)
_G, _T = _LANE // 4, _LANE % 4
"""The row and column group of a lane, as the manual draws them."""


@handles("mma")
def mma(program, kinds, args, active):
    d, a, b, c = args
    shape, kind = next(x for x in kinds if x.startswith("m16")), kinds[-2]
    left, right = ([program.bits(x, 32).reshape(-1, 32) for x in group] for group in (a, b))
    depth = int(shape.split("k")[1])
    fill = _tf32_operands if kind == "tf32" else _half_operands
    x, y = fill(left, right, program.threads // 32, depth, kind)
    product = x.astype(np.float64) @ y.astype(np.float64)
    for k, target in enumerate(d):
        old = program.value(c[k], "f32").reshape(-1, 32)
        entries = product[:, _G + 8 * (k // 2), 2 * _T + k % 2] + old
        program.put(target, entries.astype(np.float32).reshape(-1), active)


def _tf32_operands(left, right, warps, depth, kind):
    x, y = np.zeros((warps, 16, depth), np.float32), np.zeros((warps, depth, 8), np.float32)
    for k, register in enumerate(left):
        x[:, _G + 8 * (k % 2), _T + 4 * (k // 2)] = (register & 0xFFFFE000).astype(np.uint32).view(np.float32)
    for k, register in enumerate(right):
        y[:, _T + 4 * k, _G] = (register & 0xFFFFE000).astype(np.uint32).view(np.float32)
    return x, y


def _half_operands(left, right, warps, depth, kind):
    x, y = np.zeros((warps, 16, depth), np.float32), np.zeros((warps, depth, 8), np.float32)
    for e in range(2):
        for k, register in enumerate(left):
            x[:, _G + 8 * (k % 2), 2 * _T + e + 8 * (k // 2)] = from_half(register >> (16 * e), kind)
        for k, register in enumerate(right):
            y[:, 2 * _T + e + 8 * k, _G] = from_half(register >> (16 * e), kind)
    return x, y


@handles("wgmma")
def wgmma(program, kinds, args, active):
    if kinds[0] == "commit_group":
        program.products.append(([], set()))
    elif kinds[0] == "wait_group":
        program.products = program.products[len(program.products) - 1 - args[0] :]
        program.shared.being_read[:] = False
        for reads, _ in program.products:
            for at in reads:
                program.shared.being_read[at] = True
    elif kinds[0] == "mma_async":
        _group_product(program, kinds, args, active)


def _group_product(program, kinds, args, active):
    """B, and mostly A, come from shared memory, and the result is there after a wait."""
    d, a, b, scale = args[:4]
    flags, kind = args[6:], kinds[-1]
    columns, groups = int(re.fullmatch(r"m64n(\d+)k16", kinds[3])[1]), program.threads // 128
    lane = np.arange(128)
    g, t, warp = lane % 32 // 4, lane % 4, lane // 32
    if isinstance(a, list):
        left = np.zeros((groups, 64, 16), np.float32)
        for k, register in enumerate(a):
            x = program.bits(register, 32).reshape(groups, 128)
            for e in range(2):
                at = (slice(None), 16 * warp + g + 8 * (k % 2), 2 * t + e + 8 * (k // 2))
                left[at] = from_half(x >> (16 * e), kind)
    else:
        left = _from_shared(program, a, 64, bool(flags[0]), kind)
    right = _from_shared(program, b, columns, bool(flags[-1]), kind)
    product = left.astype(np.float64) @ right.astype(np.float64).transpose(0, 2, 1)
    keep = np.full(program.threads, bool(scale)) if isinstance(scale, int) else program.registers[scale]
    program.products[-1][1].update(d)
    for k, target in enumerate(d):
        entries = product[:, 16 * warp + g + 8 * (k % 4 // 2), 8 * (k // 4) + 2 * t + k % 2].reshape(-1)
        old = program.registers[target].view(np.float32) if keep.any() else 0.0
        program.put(target, (entries + np.where(keep, old, 0.0)).astype(np.float32), active)


def _from_shared(program, descriptor, rows, transposed, kind):
    """(groups, rows, 16): an operand that lies in shared memory as its descriptor says."""
    word = program.bits(descriptor, 64).reshape(-1, 128)[:, 0].astype(np.int64)
    start, leading, stride = (((word >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    mode = int((word[0] >> 62) & 3)
    if mode == 0 or ((word >> 49) & 7).any():
        raise PtxError("matrix descriptor without swizzle, or with a base offset")
    width, mask = {1: (128, 7), 2: (64, 3), 3: (32, 1)}[mode]
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    matrix = np.zeros((len(word), rows, 16), np.float32)
    for n in range(len(word)):
        if transposed:
            offset = (r * 2) % width + k % 8 * width + (r * 2) // width * leading[n] + k // 8 * stride[n]
        else:
            offset = r % 8 * width + k * 2 + r // 8 * stride[n]
        linear = start[n] + offset
        at = (linear ^ ((linear >> 3) & (mask << 4)))[..., None] + np.arange(2)
        raw = program.shared.load_for_product(at, n)
        program.products[-1][0].append(at)
        matrix[n] = from_half(np.ascontiguousarray(raw).view(np.uint16)[..., 0].astype(np.uint32), kind)
    return matrix
