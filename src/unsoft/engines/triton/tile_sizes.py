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
"""Of kernels that follow the rules for NaN and Inf, by whether heads are wider than 128; they rarely run. No
other tile has fewer rows: partial sums that belong to blocks of rows are written over."""


COSTLY = frozenset({"erf", "expdiff", "expm1", "log1p", "softplus", "tanh", "sin", "cos", "sinh"})
"""Operations that take many instructions, so that a tile needs more registers."""


def candidates(
    kernel: str, architecture: str, width: int, bits: int, costly: bool = False
) -> list[TileSizes]:
    """Sizes to try until one fits, the fastest to be expected first. ``bits``: of a number of the inputs.

    >>> candidates("forward", "sm_90", 64, 16)[0].rows >= 64
    True

    A GPU that the table does not know has the sizes of its nearest relative:

    >>> candidates("forward", "sm_89", 128, 16) == candidates("forward", "sm_80", 128, 16)
    True
    """
    known = _table()[_relative(architecture)]
    usual, special = known[kernel], known.get(f"{kernel}, costly", {})
    widest = str(min(w for w in map(int, usual) if w >= min(width, 256)))
    found = [TileSizes(*(special.get(widest, usual[widest]) if costly else usual[widest]))]
    for _ in range(bits // 32):  # twice and four times the bytes for every number
        rows, keys, warps, stages = found[0]
        found = [TileSizes(max(rows // 2, 16), max(keys // 2, 16), warps, max(stages - 1, 1))]
    while found[-1] != SMALLEST:
        found.append(_smaller(found[-1]))
    return found


@cache
def is_costly(formula: str) -> bool:
    """Does the formula of a key have an operation that takes many instructions?

    >>> is_costly(Formula("tanh(s)/n").key), is_costly(Formula("max(s, 0)/n").key)
    (True, False)
    """
    made = Formula.from_key(formula)
    parts = [part for part in (made.weight, made.mass, made.peak) if part is not None]
    return any(node.op in COSTLY for node in postorder(*parts))


def _relative(architecture: str) -> str:
    """The architecture of the table whose name begins alike: sm_80 for sm_89, gfx942 for gfx90a."""
    alike = {name: len(commonprefix((name, architecture))) for name in _table()}
    nearest = max(alike, key=lambda name: alike[name])
    return nearest if alike[nearest] >= len("sm_8") else "other"


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
