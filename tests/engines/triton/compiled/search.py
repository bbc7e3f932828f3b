"""Search tile sizes that fit each GPU and write src/unsoft/engines/triton/tile_sizes.json.

    python -m tests.engines.triton.compiled.search [TARGET ...]

For every target, head width and kernel it compiles candidates, the fastest to be expected first, until one
takes no spilled register into a loop and fits the shared memory, for every formula of the table (table.py);
formulas with costly operations may get sizes of their own. Other widths keep the sizes of "other".
"""

import json
import sys
from itertools import product

from tests.engines.triton.compiled.ahead import TARGETS, compile_launch, example, launches, pretending
from tests.engines.triton.compiled.resources import resources
from tests.engines.triton.compiled.table import FORMULAS
from unsoft.engines.triton import launch
from unsoft.engines.triton.launch import KERNELS, TileSizes, is_costly
from unsoft.files import write_whole

CANDIDATES = {
    64: {
        "forward": ["128 64 4 3", "128 64 4 2", "128 64 8 2", "64 64 4 2", "64 32 4 2"],
        "query_gradients": ["128 64 8 2", "64 64 4 2", "64 32 4 2", "32 32 4 2"],
        "key_gradients": ["64 64 4 2", "32 64 4 2", "32 32 4 2", "16 64 4 2", "32 32 4 1"],
    },
    128: {
        "forward": ["128 64 8 2", "128 32 8 2", "64 64 4 3", "64 64 4 2", "64 32 4 2", "32 32 4 2"],
        "query_gradients": ["64 64 4 2", "64 32 4 2", "64 64 8 2", "32 32 4 2"],
        "key_gradients": ["32 64 4 2", "16 64 4 2", "32 32 4 2", "32 32 4 1", "16 32 4 1"],
    },
}
"""By head width. Larger tiles read keys and queries less often; what spills on sm_80 is left out."""


def without_fault(target: str, width: int, kernel: str, sizes: TileSizes, costly: bool) -> bool:
    """Return True if all formulas of a kind compile well with tiles of this size."""
    for name, formula in FORMULAS.items():
        if is_costly(formula.key) != costly:
            continue
        made = next(x for x in launches(example(formula, width=width), target) if x.name == kernel)
        with pretending(target, None):
            used = resources(compile_launch(made, sizes))
        numbers = (used.registers, used.spills_in_loops, used.shared)
        print(target, width, kernel, *sizes, name, *numbers, flush=True)
        if not used.matrix or used.spills_in_loops or used.shared > used.shared_limit:
            return False
    return True


def main() -> None:
    table = json.loads(launch._TABLE.read_text())
    for target in sys.argv[1:] or TARGETS:
        known = table[target] = {kernel: dict(table["other"][kernel]) for kernel in KERNELS}
        for width, kernel in product(CANDIDATES, KERNELS):
            tried = [TileSizes(*map(int, text.split())) for text in CANDIDATES[width][kernel]]
            for costly in (False, True):
                fits = (sizes for sizes in tried if without_fault(target, width, kernel, sizes, costly))
                chosen = list(next(fits))
                if not costly:
                    known[kernel][str(width)] = chosen
                elif chosen != known[kernel][str(width)]:
                    known.setdefault(f"{kernel}, costly", {})[str(width)] = chosen
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
