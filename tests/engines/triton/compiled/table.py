"""Record the resources of the kernels for six kinds of GPU in resources.csv.

    python -m tests.engines.triton.compiled.table [TARGET ...]

Every kernel at the tile sizes that are shipped, in bfloat16, causal, with grouped heads: registers, spilled
bytes, accesses to them in loops, shared memory and matrix instructions (products); for A100 and H100 also the
cycles a logit takes each unit (throughput.py). docs/generate/gpu.py summarises it in docs/gpu.md.
"""

import csv
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tests.engines.triton.compiled.ahead import (
    TARGETS,
    compile_launch,
    example,
    first_sizes,
    launches,
    pretending,
)
from tests.engines.triton.compiled.resources import resources
from tests.engines.triton.throughput import MACHINES, cycles, teraflops
from unsoft.engines.triton.launch import KERNELS
from unsoft.files import write_csv
from unsoft.mechanisms import resolve

FILE = Path(__file__).with_name("resources.csv")
FORMULAS = {name: resolve(name) for name in ("cog", "softpick")}
"""A signed formula, and one whose functions take many instructions."""
WIDTHS = (64, 128)


def rows(target: str, width: int, formula: str) -> Iterator[dict[str, Any]]:
    """Compile the kernels and yield the lines of the table."""
    usual = launches(example(FORMULAS[formula], width=width), target)
    few = launches(example(FORMULAS[formula], width=width, queries=1, keys=8192, causal=False), target)
    of_table = [made for made in usual if made.name in KERNELS]
    for made in [*of_table, *(made for made in few if made.name in ("decode", "combine"))]:
        sizes = first_sizes(made, target)
        with pretending(target, None):
            used = resources(compile_launch(made, sizes))
        row = {"target": target, "width": width, "formula": formula, "kernel": made.name, **sizes._asdict()}
        row |= {"registers": used.registers, "spilled": used.spilled, "in_loops": used.spills_in_loops}
        row |= {"shared": used.shared, "products": used.matrix}
        if target in MACHINES and not made.sizes:
            busy = cycles(used.hot, target, sizes.rows * sizes.keys, sizes.warps)
            row |= {unit: f"{number:.4f}" for unit, number in busy.items()}
            turns, overlap = teraflops(busy, target)
            row |= {"gpu": MACHINES[target].name, "turns": round(turns), "overlap": round(overlap)}
        yield {name: str(x) for name, x in row.items()}


def committed() -> dict[tuple[str, int, str], list[dict[str, str]]]:
    """Return the lines of the file by target, width and formula, without empty cells."""
    table: dict[tuple[str, int, str], list[dict[str, str]]] = {}
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            filled = {name: x for name, x in row.items() if x}
            table.setdefault((row["target"], int(row["width"]), row["formula"]), []).append(filled)
    return table


def main() -> None:
    table = committed() if FILE.exists() else {}
    for formula, width, target in product(FORMULAS, WIDTHS, sys.argv[1:] or TARGETS):
        table[target, width, formula] = list(rows(target, width, formula))
        print(target, formula, width, flush=True)
        order = [table.get((t, w, f), []) for t, w, f in product(TARGETS, WIDTHS, FORMULAS)]
        write_csv(FILE, [row for part in order for row in part])


if __name__ == "__main__":
    main()
