"""The table of what every kernel takes of every GPU, resources.csv beside this file.

    python -m tests.engines.triton.compiled.table

compiles everything and writes it anew (some minutes); the test compares.
"""

import csv
import io
from pathlib import Path

from tests.engines.triton.compiled.ahead import (
    TARGETS,
    compile_launch,
    example,
    first_sizes,
    launches,
    pretending,
)
from tests.engines.triton.compiled.resources import resources
from unsoft.files import write_whole
from unsoft.mechanisms import resolve

FILE = Path(__file__).parent / "resources.csv"
FORMULAS = {"cog": resolve("cog")}
"""A signed formula with a peak and a mass."""
WIDTHS = (64, 128)


def rows(name: str, target: str, width: int) -> list[dict[str, object]]:
    """What the three kernels of a formula take, in bfloat16, causal, with grouped heads."""
    found = []
    for made in launches(example(FORMULAS[name], width=width), target):
        with pretending(target, None):
            sizes = first_sizes(made, target)
            used = resources(compile_launch(made, sizes))
        found.append(
            {
                "target": target,
                "width": width,
                "formula": name,
                "kernel": made.name,
                "tile": f"{sizes.rows}x{sizes.keys}",
                "warps": sizes.warps,
                "stages": sizes.stages,
                "registers": used.registers,
                "spilled bytes": used.spilled,
                "spills in loops": used.spills_in_loops,
                "instructions in loops": used.instructions_in_loops,
                "shared bytes": used.shared,
                "shared limit": used.shared_limit,
                "matrix instructions": used.matrix,
            }
        )
    return found


def committed() -> list[dict[str, str]]:
    with FILE.open() as file:
        return list(csv.DictReader(file))


def main() -> None:
    text = io.StringIO()
    writer = None
    for target in TARGETS:
        for width in WIDTHS:
            for name in FORMULAS:
                for row in rows(name, target, width):
                    if writer is None:
                        writer = csv.DictWriter(text, row, lineterminator="\n")
                        writer.writeheader()
                    writer.writerow(row)
                    print(*row.values(), flush=True)
                write_whole(FILE, text.getvalue().encode())


if __name__ == "__main__":
    main()
