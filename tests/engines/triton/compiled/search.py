"""Search tile sizes that fit each GPU and write src/unsoft/engines/triton/tile_sizes.json.

    python -m tests.engines.triton.compiled.search [TARGET ...]

For every target, head width and kernel it compiles the candidates, among them FlexAttention's, with every
formula of the table (table.py). Where throughput.py knows the GPU, the best estimate wins. It counts spilled
registers as memory traffic; a loop may access them MOST_SPILLS times, about one of a hundred instructions.
Elsewhere the first candidate without such accesses wins, the fastest to be expected first. Formulas with
costly operations may get sizes of their own. Other widths keep the sizes of "other".
"""

import json
import sys
from itertools import product

from tests.engines.triton.compiled.ahead import TARGETS, compile_launch, example, launches, pretending
from tests.engines.triton.compiled.resources import resources
from tests.engines.triton.compiled.table import FORMULAS
from tests.engines.triton.throughput import MACHINES, cycles, teraflops
from unsoft.engines.triton import launch
from unsoft.engines.triton.launch import KERNELS, TileSizes, is_costly
from unsoft.files import write_whole

CANDIDATES = {
    64: {
        "forward": ["128 128 8 3", "128 64 4 3", "128 64 8 2", "64 64 4 2", "64 32 4 2"],
        "query_gradients": ["128 128 8 2", "128 64 8 2", "64 64 4 2", "64 32 4 2", "32 32 4 2"],
        "key_gradients": ["64 128 8 2", "64 64 4 2", "32 64 4 2", "32 32 4 2", "16 64 4 2", "32 32 4 1"],
    },
    128: {
        "forward": ["128 64 8 3", "128 64 8 2", "128 32 8 2", "64 64 4 3", "64 64 4 2", "64 32 4 2"],
        "query_gradients": ["128 64 8 2", "64 64 4 2", "64 32 4 2", "64 64 8 2", "32 32 4 2"],
        "key_gradients": ["64 128 8 2", "32 128 8 2", "64 64 8 2", "32 64 4 2", "16 64 4 2", "32 32 4 1"],
    },
}
"""By head width. Larger tiles read keys and queries less often."""
MOST_SPILLS = 32
"""Accesses to spilled registers in a loop, where the estimate decides."""


def score(target: str, width: int, kernel: str, sizes: TileSizes, costly: bool) -> float:
    """Return the lowest estimate of a formula of this kind, in TFLOP/s if products and other work take turns;
    1 for a GPU that throughput.py does not know, and 0 if tiles of this size do not compile well."""
    lowest = float("inf")
    for name, formula in FORMULAS.items():
        if is_costly(formula.key) != costly:
            continue
        made = next(x for x in launches(example(formula, width=width), target) if x.name == kernel)
        with pretending(target, None):
            used = resources(compile_launch(made, sizes))
        spills, known = used.spills_in_loops, target in MACHINES
        estimate = 1.0
        if known:
            busy = cycles(used.hot, target, sizes.rows * sizes.keys, sizes.warps)
            estimate = teraflops(busy, target)[0]
        print(target, width, kernel, *sizes, name, used.registers, spills, used.shared, estimate, flush=True)
        if not used.matrix or spills > MOST_SPILLS * known or used.shared > used.shared_limit:
            return 0.0
        lowest = min(lowest, estimate)
    return lowest


def best(target: str, width: int, kernel: str, costly: bool) -> TileSizes:
    """Return the candidate with the highest score; the first with any, for a GPU without estimates."""
    tried = [TileSizes(*map(int, text.split())) for text in CANDIDATES[width][kernel]]
    if target in MACHINES:
        return max(tried, key=lambda sizes: score(target, width, kernel, sizes, costly))
    return next(sizes for sizes in tried if score(target, width, kernel, sizes, costly))


def main() -> None:
    table = json.loads(launch._TABLE.read_text())
    for target in sys.argv[1:] or TARGETS:
        known = table[target] = {kernel: dict(table["other"][kernel]) for kernel in KERNELS}
        for width, kernel in product(CANDIDATES, KERNELS):
            known[kernel][str(width)] = list(best(target, width, kernel, costly=False))
            special = list(best(target, width, kernel, costly=True))
            if special != known[kernel][str(width)]:
                known.setdefault(f"{kernel}, costly", {})[str(width)] = special
        write_whole(launch._TABLE, text_of(table).encode())


def text_of(content: dict[str, dict[str, dict[str, list[int]]]]) -> str:
    """JSON with one line for each kernel."""
    parts = [
        f' "{target}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(sizes)}' for name, sizes in kernels.items())
        + "\n }"
        for target, kernels in content.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
