"""Which tile sizes fit which GPU? Writes src/unsoft/engines/triton/tile_sizes.json.

    python -m tests.engines.triton.compiled.search [TARGET ...]

For every target, head width and kernel it compiles candidates, the fastest to be expected first, until one
takes no spilled register into a loop and fits the shared memory, for cog: a signed formula with a peak and a
mass. Other widths and architectures keep the sizes of "other".
"""

import json
import sys

from tests.engines.triton.compiled import table
from tests.engines.triton.compiled.ahead import TARGETS, compile_launch, example, launches, pretending
from tests.engines.triton.compiled.resources import resources
from unsoft.engines.triton import tile_sizes
from unsoft.engines.triton.tile_sizes import KERNELS, TileSizes
from unsoft.files import write_whole
from unsoft.mechanisms import resolve

CANDIDATES = {
    64: {
        "forward": ["128 64 4 3", "128 64 8 2", "64 64 4 2", "64 32 4 2"],
        "query_gradients": ["128 64 8 2", "64 64 4 2", "64 32 4 2", "32 32 4 2"],
        "key_gradients": ["64 64 4 2", "32 64 4 2", "16 64 4 2", "32 32 4 1"],
    },
    128: {
        "forward": ["128 64 8 2", "64 64 4 2", "64 32 4 2", "32 32 4 2"],
        "query_gradients": ["64 64 4 2", "64 32 4 2", "32 32 4 2"],
        "key_gradients": ["32 64 4 2", "16 64 4 2", "32 32 4 1"],
    },
}
"""By head width. Larger tiles read keys and queries less often; what spills on sm_80 is left out."""


def sizes_without_fault(made, target: str) -> TileSizes:
    """The first candidate that compiles well; the last if none does."""
    for text in CANDIDATES[made.width][made.name]:
        sizes = TileSizes(*map(int, text.split()))
        with pretending(target, None):
            used = resources(compile_launch(made, sizes))
        print(
            target, made.width, made.name, text, used.registers, used.spills_in_loops, used.shared, flush=True
        )
        if used.matrix and not used.spills_in_loops and used.shared <= used.shared_limit:
            break
    return sizes


def main() -> None:
    found = json.loads(tile_sizes._TABLE.read_text())
    for target in sys.argv[1:] or TARGETS:
        known = found[target] = {kernel: dict(found["other"][kernel]) for kernel in KERNELS}
        for width in table.WIDTHS:
            for made in launches(example(resolve("cog"), width=width), target):
                known[made.name][str(width)] = list(sizes_without_fault(made, target))
        write_whole(tile_sizes._TABLE, text_of(found).encode())


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
