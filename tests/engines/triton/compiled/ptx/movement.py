"""Instructions that move data: memory, asynchronous copies, barriers, other threads of a warp."""

import numpy as np

from tests.engines.triton.compiled.ptx.numbers import UNSIGNED
from tests.engines.triton.compiled.ptx.program import handles


@handles("ld")
def ld(program, kinds, args, active):
    width = int(kinds[-1][1:])
    if kinds[0] == "param":
        name, offset = args[1]
        number = (program.params[name] >> 8 * offset) & ((1 << width) - 1)
        program.put(args[0], np.full(program.threads, number, np.uint64).astype(UNSIGNED[width]), active)
        return
    targets = args[0] if isinstance(args[0], list) else [args[0]]
    size = width // 8 * len(targets)
    raw = np.zeros((program.threads, size), np.uint8)
    if kinds[0] == "global":
        addresses = program.addresses(args[1], 64)[active]
        raw[active] = program.memory.bytes[program.memory.places(addresses, size)]
    else:
        addresses = program.addresses(args[1], 32)[active]
        raw[active] = program.shared.load(addresses, size, program.warp[active])
    for k, target in enumerate(targets):
        part = np.ascontiguousarray(raw[:, k * width // 8 : (k + 1) * width // 8])
        program.put(target, part.view(UNSIGNED[width])[:, 0], active)


@handles("st")
def st(program, kinds, args, active):
    width = int(kinds[-1][1:])
    sources = args[1] if isinstance(args[1], list) else [args[1]]
    parts = [np.ascontiguousarray(program.bits(x, width))[:, None].view(np.uint8) for x in sources]
    raw = np.concatenate(parts, 1)[active]
    if kinds[0] == "global":
        addresses = program.addresses(args[0], 64)[active]
        program.memory.bytes[program.memory.places(addresses, raw.shape[1])] = raw
    else:
        program.shared.store(program.addresses(args[0], 32)[active], raw, program.warp[active])


@handles("cp")
def cp(program, kinds, args, active):
    shared = program.shared
    if "commit_group" in kinds:
        shared.copies.append([])
    elif "wait_group" in kinds or "wait_all" in kinds:
        shared.wait_for_copies(args[0] if args else 0)
    else:
        size = args[2]
        wanted = program.bits(args[3], 32) if len(args) > 3 else np.full(program.threads, size)
        raw, reads = np.zeros((program.threads, size), np.uint8), active & (wanted > 0)
        addresses = program.addresses(args[1], 64)[reads]
        raw[reads] = program.memory.bytes[program.memory.places(addresses, size)]
        shared.begin_copy(program.addresses(args[0], 32)[active], raw[active], program.warp[active])


@handles("bar")
def bar(program, kinds, args, active):
    if kinds[0] == "sync":
        program.shared.epoch += 1


@handles("fence")
def fence(program, kinds, args, active):
    if "async" in kinds:
        program.shared.unfenced[:] = False


@handles("shfl")
def shfl(program, kinds, args, active):
    x, lane = program.bits(args[1], 32).reshape(-1, 32), np.arange(program.threads).reshape(-1, 32) % 32
    other = program.bits(args[2], 32).astype(np.int64).reshape(-1, 32)
    source = {
        "idx": other,
        "bfly": lane ^ other,
        "up": np.maximum(lane - other, 0),
        "down": np.minimum(lane + other, 31),
    }[kinds[1]]
    values = np.take_along_axis(x, source & 31, 1).reshape(-1)
    program.put(args[0].split("|")[0], values, active)


@handles("redux")
def redux(program, kinds, args, active):
    """One number of all threads of a warp."""
    reduce = {"max": np.max, "min": np.min, "add": np.sum, "or": np.bitwise_or.reduce}[kinds[1]]
    x = program.value(args[1], kinds[2]).reshape(-1, 32)
    values = np.asarray(reduce(x, axis=1)).astype(x.dtype)
    program.put(args[0], np.repeat(values, 32), active)


@handles("ldmatrix")
def ldmatrix(program, kinds, args, active):
    asked, rows = _row_holders(program, len(args[0])), np.zeros((program.threads, 16), np.uint8)
    rows[asked] = program.shared.load(program.addresses(args[1], 32)[asked], 16, program.warp[asked])
    matrices = rows.view(np.uint16).reshape(-1, 4, 8, 8)
    if "trans" in kinds:
        matrices = matrices.transpose(0, 1, 3, 2)
    for k, target in enumerate(args[0]):
        pairs = np.ascontiguousarray(matrices[:, k].reshape(-1, 32, 2)).view(np.uint32)
        program.put(target, pairs.reshape(-1), active)


@handles("stmatrix")
def stmatrix(program, kinds, args, active):
    pairs = [np.ascontiguousarray(program.bits(x, 32)).view(np.uint16).reshape(-1, 8, 8) for x in args[1]]
    matrices = np.stack(pairs, 1)
    if "trans" in kinds:
        matrices = matrices.transpose(0, 1, 3, 2)
    asked, raw = _row_holders(program, len(pairs)), np.ascontiguousarray(matrices).view(np.uint8)
    addresses = program.addresses(args[0], 32)[asked]
    program.shared.store(addresses, raw.reshape(-1, 16), program.warp[asked])


def _row_holders(program, count):
    """The threads whose addresses count: eight of every warp for each of ``count`` matrices of 8 x 8."""
    return np.arange(program.threads) % 32 < 8 * count
