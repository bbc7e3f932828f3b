"""Estimate the cycles per logit of each unit of a multiprocessor from the instructions of a loop; not a
measurement.

For each unit: instructions of the loop times the cycles that one of them keeps the unit busy, over the logits
of a tile. If everything overlaps, the busiest unit decides; if matrix products and all other work take turns,
their sum does. A kernel that runs lies between, and waits for memory besides. Throughputs are NVIDIA's (CUDA
C++ Programming Guide, table of arithmetic instructions; white papers of A100 and H100). Conversions of
numbers count as integer arithmetic.
"""

import re
from collections import Counter
from dataclasses import dataclass

_FMA = r"(FFMA|FMUL|FADD|HFMA2|HADD2|HMUL2)\b"
_SPECIAL = r"MUFU"
_MEMORY = r"(LDS|STS|LDSM|STSM|LDGSTS|LDG|STG|SHFL|LDL|STL)\b"
_OF_THE_WARP = (
    r"HMMA|HGMMA|U[A-Z]|BAR|DEPBAR|WARP|BRA|NOP|MEMBAR|FENCE|LDGDEPBAR|R2UR|S2|CS2R|BSYNC|BSSY|EXIT"
)
"""Matrix products, branches, barriers and what runs once for a warp: no work of the 32 lanes."""


@dataclass(frozen=True)
class Machine:
    """One GPU: its multiprocessors, and how many lanes of each instruction one of them does a cycle."""

    name: str
    multiprocessors: int
    gigahertz: float
    products: int
    """Multiplications with addition of bfloat16 matrices."""
    fma: int
    alu: int = 64
    special: int = 16
    bytes_shared: int = 128
    issue: int = 4
    """Instructions of warps that start."""

    @property
    def teraflops(self) -> float:
        """Speed of matrix products, as in the data sheet."""
        return 2 * self.products * self.multiprocessors * self.gigahertz / 1000


MACHINES = {
    "sm_80": Machine("A100", 108, 1.41, products=1024, fma=64),
    "sm_90": Machine("H100", 132, 1.83, products=2048, fma=128),
}
UNITS = ("matrix", "special", "fma", "alu", "memory", "issue")


def cycles(loops: tuple[Counter, ...], target: str, logits: int, warps: int) -> dict[str, float]:
    """Cycles a logit by unit, and under "flop" the floating-point operations of its matrix products, of the
    loop that has no masks; ``logits`` of a tile, ``warps`` of a program."""
    machine, loop = MACHINES[target], min(loops, key=lambda body: sum(body.values()))
    loop = Counter({name: n for name, n in loop.items() if name})

    def instructions(pattern: str) -> int:
        return warps * sum(n for name, n in loop.items() if re.match(pattern, name))

    total = warps * sum(loop.values())
    fma, special, memory = (instructions(pattern) for pattern in (_FMA, _SPECIAL, _MEMORY))
    alu = total - fma - special - memory - instructions(_OF_THE_WARP)
    moved = warps * sum(n * bytes_moved(name) for name, n in loop.items() if re.match(_MEMORY, name))
    products = sum(n * multiplications(name) * warps for name, n in loop.items())
    paced = sum(n * multiplications(name) * slowdown(name) * warps for name, n in loop.items())
    busy = {
        "matrix": paced / machine.products,
        "special": 32 * special / machine.special,
        "fma": 32 * fma / machine.fma,
        "alu": 32 * alu / machine.alu,
        "memory": moved / machine.bytes_shared,
        "issue": total / machine.issue,
        "flop": 2 * products,
    }
    return {unit: total / logits for unit, total in busy.items()}


def teraflops(busy: dict[str, float], target: str) -> tuple[float, float]:
    """Return the speed of a kernel's matrix products if they take turns with all other work, and if
    everything overlaps."""
    machine, others = MACHINES[target], max(busy[unit] for unit in UNITS[1:])
    speed = busy["flop"] * machine.multiprocessors * machine.gigahertz / 1000
    return speed / (busy["matrix"] + others), speed / max(busy["matrix"], others)


def multiplications(name: str) -> float:
    """Return the multiplications of one warp's matrix instruction; four warps of Hopper share one."""
    if shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
        return int(shape[1]) * int(shape[2]) * int(shape[3]) / 4
    if depth := re.match(r"HMMA\.16(?:8)?(8|16)\b", name):
        return 16 * 8 * int(depth[1])
    return 0


def slowdown(name: str) -> float:
    """Return how much longer a matrix instruction takes than at the full rate.

    wgmma m64nNk16 multiplies for N / 2 cycles. Meanwhile it reads 64 x 16 and N x 16 numbers of two bytes
    from shared memory, at 128 bytes a cycle: 16 + N / 4 cycles, which is more below N = 64.
    """
    shape = re.match(r"HGMMA\.\d+x(\d+)x\d+", name)
    return 1.0 if shape is None else max(1.0, (16 + int(shape[1]) / 4) / (int(shape[1]) / 2))


def bytes_moved(name: str) -> int:
    """Return the bytes that a warp moves through shared memory or the first-level cache."""
    if matrices := re.search(r"LDSM\S*\.(2|4)$|STSM\S*\.(2|4)$", name):
        return 128 * int(matrices[1] or matrices[2])
    bits = re.search(r"\.(64|128)\b", name)
    return 4 * 32 * (int(bits[1]) // 32 if bits else 1)
