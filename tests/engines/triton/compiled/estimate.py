"""How long a tile takes, from the instructions of its loop: a static model of one multiprocessor,
not a measurement.

    python -m tests.engines.triton.compiled.estimate cog softmax

For each unit, cycles a logit = (instructions of the loop) x (cycles each takes the unit) / (logits of the
tile). If everything overlaps, the busiest unit decides; if matrix products and everything else take turns,
their sum does. A real kernel lies between, or above. The loop meant is the one without masks, the first hot
loop of each kernel. Throughputs are NVIDIA's (CUDA C++ Programming Guide, arithmetic instructions; white
papers of A100 and H100).
"""

import re
import sys
from dataclasses import dataclass

from tests.engines.triton.compiled.ahead import compile_launch, example, first_sizes, launches, pretending
from tests.engines.triton.compiled.resources import resources
from unsoft.mechanisms import resolve


@dataclass(frozen=True)
class Machine:
    """Lanes a cycle of one multiprocessor, by unit; ``products``: multiply-adds of bfloat16 matrices a
    cycle."""

    name: str
    multiprocessors: int
    gigahertz: float
    products: int
    fma: int
    alu: int = 64
    special: int = 16
    memory: int = 32
    issue: int = 4


MACHINES = {
    "sm_80": Machine("A100", 108, 1.41, 1024, fma=64),
    "sm_90": Machine("H100", 132, 1.755, 4096, fma=128),
}
FMA, SPECIAL = r"(FFMA|FMUL|FADD|HFMA2|HADD2|HMUL2)\b", r"MUFU"
MEMORY = r"(LDS|STS|LDSM|STSM|LDGSTS|LDG|STG|SHFL|LDL|STL)\b"
NONE = (
    r"(HMMA|HGMMA|U[A-Z]|BAR|DEPBAR|WARP|BRA|NOP|MEMBAR|FENCE|LDGDEPBAR|ARRIVE|R2UR|S2|CS2R|BSYNC|BSSY|EXIT)"
)


def cycles(loop, sizes, target: str) -> dict[str, float]:
    """Cycles a logit that each unit of a multiprocessor is busy."""
    machine, logits, warps = MACHINES[target], sizes.rows * sizes.keys, sizes.warps

    def count(pattern: str) -> int:
        return warps * sum(n for name, n in loop.items() if re.match(pattern, name))

    total = warps * sum(n for name, n in loop.items() if name)
    groups = warps / 4 if target == "sm_90" else warps
    products = groups * sum(n * multiply_adds(name) for name, n in loop.items())
    alu = total - sum(map(count, (FMA, SPECIAL, MEMORY, NONE)))
    return {
        "matrix": products / machine.products / logits,
        "special": 32 * count(SPECIAL) / machine.special / logits,
        "fma": 32 * count(FMA) / machine.fma / logits,
        "alu": 32 * alu / machine.alu / logits,
        "memory": 32 * count(MEMORY) / machine.memory / logits,
        "issue": total / machine.issue / logits,
    }


def multiply_adds(name: str) -> int:
    """Of one matrix instruction."""
    if found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
        return int(found[1]) * int(found[2]) * int(found[3])
    if found := re.match(r"HMMA\.(16816|1688)", name):
        return 16 * 8 * (16 if found[1] == "16816" else 8)
    return 0


def main() -> None:
    for target, machine in MACHINES.items():
        for name in sys.argv[1:] or ["cog"]:
            for made in launches(example(resolve(name)), target):
                with pretending(target, None):
                    sizes = first_sizes(made, target)
                    loop = resources(compile_launch(made, sizes)).hot[0]
                found = cycles(loop, sizes, target)
                others = max(value for unit, value in found.items() if unit != "matrix")
                row = [machine.name, name, made.name, *(f"{value:.3f}" for value in found.values())]
                print(
                    "|",
                    " | ".join(
                        [*row, f"{max(found['matrix'], others):.3f}", f"{found['matrix'] + others:.3f}"]
                    ),
                    "|",
                )


if __name__ == "__main__":
    main()
