"""Run a compiled kernel on its arguments."""

from typing import Any

import numpy as np

from tests.engines.triton.compiled.ptx import arithmetic, movement, products  # noqa: F401 (they add instructions)
from tests.engines.triton.compiled.ptx.memory import GlobalMemory
from tests.engines.triton.compiled.ptx.program import Program
from tests.engines.triton.compiled.ptx.text import read


def run(made: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
    """Run all programs of the grid; tensors are changed in place."""
    memory, values = GlobalMemory(tensors_in(list(arguments.values()))), []

    def add(kind: Any, x: Any) -> None:
        if isinstance(kind, tuple):
            for k, y in zip(kind, x, strict=True):
                add(k, y)
        elif kind[0] == "*":
            values.append(memory.address(x))
        elif kind.startswith("fp"):
            values.append(int(np.float32(x).view(np.uint32)))
        elif kind != "constexpr":
            values.append(int(x) & (1 << 64) - 1)

    for name, kind in made.src.signature.items():
        add(kind, arguments.get(name))
    text = read(made.asm["ptx"])
    values += [0] * (len(text.params) - len(values))
    size = (*grid, 1, 1)[:3]
    for y in range(size[1]):
        for x in range(size[0]):
            warps, shared = made.metadata.num_warps, made.metadata.shared
            Program(text, (x, y, 0), size, warps, shared, values, memory).run()
    memory.copy_back()


def tensors_in(arguments: Any) -> list[Any]:
    """Return all tensors of a launch, also those inside tuples."""
    if hasattr(arguments, "untyped_storage"):
        return [arguments]
    return [t for x in arguments for t in tensors_in(x)] if isinstance(arguments, (tuple, list)) else []
