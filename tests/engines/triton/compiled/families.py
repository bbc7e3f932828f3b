"""Record the resources of the kernels of linear attention and Gaussian matrices for six kinds of GPU in
families.csv.

    python -m tests.engines.triton.compiled.families [TARGET ...]

Every kernel at the tile sizes that are shipped, causal, with grouped heads: registers, spilled bytes,
accesses to them in loops that multiply matrices, shared memory and matrix instructions (products).
"""

import csv
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from tests.engines.triton.compiled.ahead import TARGETS, compile_launch, pretending
from tests.engines.triton.compiled.resources import Resources, resources
from tests.engines.triton.linear_definition import example, logarithmic_example
from unsoft.engines.triton import gaussian, recurrence
from unsoft.engines.triton.launch import Launch
from unsoft.files import write_csv

FILE = Path(__file__).with_name("families.csv")
WIDTHS = (64, 128)
_PARTS = {
    ("state", False, False): "state",
    ("state", True, False): "state of gradients",
    ("chunk", False, False): "output",
    ("chunk", False, True): "dq",
    ("chunk", True, True): "dk",
    ("chunk", True, False): "dv",
}
"""By the name of a kernel and whether it goes backwards, and reads the state transposed."""


def linear_kernels(
    target, *, width, decays=False, logarithmic=False, dtype=torch.float32, rough=False, causal=True
) -> list[Launch]:
    """Return all launches of a forward and a backward pass, without running them."""
    started: list[Launch] = []
    shape = {"length": 256, "width": width, "value_width": width, "heads": 8, "kv_heads": 2, "state": True}
    if logarithmic:
        given = logarithmic_example(size=1.0, dtype=dtype, **shape)
    else:
        given = example(decays=decays, dtype=dtype, **shape)
    leaves = {name: x if x is None else x.requires_grad_() for name, x in given.items()}
    options = {"causal": causal, "normalise": True, "logarithmic": logarithmic, "rough": rough}
    with pretending(target, started.append):
        out, after = recurrence.recurrence(**leaves, **options)
        (out.sum() + after.sum()).backward()
    return started


def gaussian_kernels(target, *, width, dtype=torch.float32) -> list[Launch]:
    """Return all launches of building, products and gradients, with and without stored matrices, and of gates
    on values."""
    started: list[Launch] = []
    x, u = torch.zeros(4, 256, width, dtype=dtype), torch.zeros(4, 3, 256, dtype=dtype)
    with pretending(target, started.append):
        for most in (0, gaussian.STORED):
            z = gaussian.TiledGaussian(x, torch.ones(4, 256, dtype=torch.bool), u[:, 0], most=most)
            z.product(u[:, 0])
            z.gradient(u, u)
        gaussian.between(x, x)
        values, gates = x[None], u[None, :, 0]
        gaussian.gated_gradients(gaussian.gated_values(values, gates), values, gates)
    return started


FAMILIES = {
    "decay, TF32": lambda target, width: linear_kernels(target, width=width, decays=True, rough=True),
    "float32": lambda target, width: linear_kernels(target, width=width),
    "logarithms, TF32": lambda target, width: linear_kernels(
        target, width=width, logarithmic=True, rough=True
    ),
    "Gaussian": lambda target, width: gaussian_kernels(target, width=width),
}


def compiled(launches: list[Launch], target: str) -> Iterator[tuple[Launch, Resources]]:
    """Each launch with what it takes."""
    with pretending(target, None):
        for made in launches:
            yield made, resources(compile_launch(made, made.sizes[0]))


def rows(target: str, width: int, family: str) -> list[dict[str, str]]:
    """Compile the kernels and return the lines of the table without duplicates."""
    lines: list[dict[str, str]] = []
    for made, used in compiled(FAMILIES[family](target, width), target):
        row = {"target": target, "width": width, "family": family, "kernel": _part(made)}
        row |= {**made.sizes[0]._asdict(), "registers": used.registers, "spilled": used.spilled}
        row |= {"in_loops": used.spills_in_loops, "shared": used.shared, "products": used.matrix}
        written = {name: str(x) for name, x in row.items()}
        if written not in lines:
            lines.append(written)
    return lines


def committed() -> dict[tuple[str, int, str], list[dict[str, str]]]:
    """Return the lines of the file by target, width and family."""
    table: dict[tuple[str, int, str], list[dict[str, str]]] = {}
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            table.setdefault((row["target"], int(row["width"]), row["family"]), []).append(row)
    return table


def _part(made: Launch) -> str:
    fixed = made.fixed
    if made.name in ("state", "chunk"):
        return _PARTS[made.name, fixed.backwards, fixed.transposed]
    if made.name == "gating":
        return "gating" if made.arguments["grad"].pointer is None else "gating, gradients"
    if made.name == "pair_gradients":
        return f"{made.name} of {'keys' if fixed.of_keys else 'queries'}"
    return f"{made.name}, stored" if getattr(fixed, "stored", False) else made.name


def main() -> None:
    table = committed() if FILE.exists() else {}
    for width, family, target in product(WIDTHS, FAMILIES, sys.argv[1:] or TARGETS):
        table[target, width, family] = rows(target, width, family)
        print(target, family, width, flush=True)
        order = [table.get(key, []) for key in product(TARGETS, WIDTHS, FAMILIES)]
        write_csv(FILE, [row for part in order for row in part])


if __name__ == "__main__":
    main()
