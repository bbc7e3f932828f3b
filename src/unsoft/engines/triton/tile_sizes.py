"""Tile sizes of the kernels: a table found by compiling for each architecture."""

from __future__ import annotations

import json
from functools import cache
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

from unsoft.formula import Formula
from unsoft.formula.expr import postorder


class TileSizes(NamedTuple):
    """Rows and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


KERNELS = ("forward", "query_gradients", "key_gradients")
_TABLE = Path(__file__).parent / "tile_sizes.json"
SMALLEST = TileSizes(16, 16, 4, 1)
EXACT = {False: TileSizes(16, 32, 4, 1), True: SMALLEST}
"""Tile sizes of exact kernels (see ``Fixed.exact``), by whether heads are wider than 128. They rarely run. No
other kernel may have fewer rows in a tile: an exact kernel overwrites the partial sums of the fast one, which
are stored by block of rows, so every block that the fast kernel wrote must be written again."""


COSTLY = frozenset({"erf", "expdiff", "expm1", "log1p", "softplus", "tanh", "sin", "cos", "sinh"})
"""Operations that take many instructions, so that a tile needs more registers."""


def candidates(
    kernel: str, architecture: str, width: int, bits: int, costly: bool = False
) -> list[TileSizes]:
    """Return tile sizes to try until one fits, largest first. ``bits``: size of an input number.

    >>> candidates("forward", "sm_90", 64, 16)[0].rows >= 64
    True

    A GPU that is not in the table gets the sizes of its nearest relative:

    >>> candidates("forward", "sm_89", 128, 16) == candidates("forward", "sm_80", 128, 16)
    True
    """
    known = _table()[_relative(architecture)]
    usual, special = known[kernel], known.get(f"{kernel}, costly", {})
    widest = str(min(w for w in map(int, usual) if w >= min(width, 256)))
    first = TileSizes(*(special.get(widest, usual[widest]) if costly else usual[widest]))
    for _ in range(bits // 32):  # the table is for 16 bits; numbers have twice or four times the bytes
        rows, keys, warps, stages = first
        first = TileSizes(max(rows // 2, 16), max(keys // 2, 16), warps, max(stages - 1, 1))
    sizes = [first]
    while sizes[-1] != SMALLEST:
        sizes.append(_smaller(sizes[-1]))
    return sizes


@cache
def is_costly(formula: str) -> bool:
    """Return True if the formula of a key has an operation that takes many instructions.

    >>> is_costly(Formula("tanh(s)/n").key), is_costly(Formula("max(s, 0)/n").key)
    (True, False)
    """
    tree = Formula.from_key(formula)
    parts = [part for part in (tree.weight, tree.mass, tree.peak) if part is not None]
    return any(node.op in COSTLY for node in postorder(*parts))


def _relative(architecture: str) -> str:
    """Return the architecture of the table with the longest common prefix: sm_80 for sm_89, gfx942 for
    gfx90a."""
    common = {name: len(commonprefix((name, architecture))) for name in _table()}
    nearest = max(common, key=lambda name: common[name])
    return nearest if common[nearest] >= len("sm_8") else "other"


def _smaller(sizes: TileSizes) -> TileSizes:
    rows, keys, warps, stages = sizes
    if stages > 1:
        return TileSizes(rows, keys, warps, stages - 1)
    if rows > 16 and rows >= keys:
        return TileSizes(rows // 2, keys, min(warps, 4), 1)
    return TileSizes(rows, max(keys // 2, 16), 4, 1)


@cache
def _table() -> dict[str, dict[str, dict[str, list[int]]]]:
    content: dict[str, dict[str, dict[str, list[int]]]] = json.loads(_TABLE.read_text())
    return content
